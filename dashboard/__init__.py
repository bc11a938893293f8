"""dashboard: views of runs for people.

reading/      run directories as plain records
server/       the web server over these records: routes, safety, event stream
pages/        HTML, CSS and JavaScript of the pages
pictures.py   learning curves and timelines as pictures
timeline.py   the timeline of a run as text
"""
