"""dashboard: what a person looks at.

reading/      what a run directory says, as plain records
server/       the web server over these records: addresses, safety, event stream
pages/        HTML, CSS and JavaScript of the pages
curve.py      a learning curve as a picture
timeline.py   the timeline of a run, as text and as a picture
"""
