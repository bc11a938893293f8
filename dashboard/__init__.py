"""dashboard: pages, pictures and texts that show runs.

reading/      run directories as plain records
server/       the web server over these records: routes, safety, event stream
pages/        HTML, CSS and JavaScript of the pages
pictures.py   learning curves and timelines as pictures
timeline.py   the reader of timelines, and a timeline as text or trace
"""
