"""reading: run directories as plain records, without web code. Only changed files are read again.

catalogue.py           the runs below a folder, by name
run_reader.py          one run: its parts, each read once and then followed
run_pages.py           the content of each page of a run, made of those parts

metrics.py             metrics as arrays, curves, and the cards of the curves page
sample_index.py        the columns for filtering, sorting and searching samples
sample_pages.py        the sample pages
turns.py               the turns of a conversation
graph_page.py, lanes.py, workers_page.py
                       the content of the other pages
comparison.py          differences of two runs, also for `weft diff`
"""
