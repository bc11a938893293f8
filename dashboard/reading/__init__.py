"""reading: run directories as plain records, without web code.

catalogue.py           the runs below a folder, by name
run_reader.py          one run: its parts, each read once and then followed
run_pages.py           weights, a group of samples, SQL, and the requests to a run's driver

metrics.py             metrics as arrays, curves, and the cards of the curves page
sample_index.py        the columns for filtering, sorting and searching samples
sample_pages.py        the sample pages
turns.py               the turns of a conversation
episodes.py            the rows of an episode as a tree of turns
graph_page.py, lanes.py, workers_page.py
                       the content of the other pages, made of those parts
comparison.py          differences of two runs, also for `weft diff`
"""
