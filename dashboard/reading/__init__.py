"""reading: what run directories say, as plain records. No web in it; everything is read again only where a file has changed.

catalogue.py           the runs below a folder, by name
run_reader.py          one run: its parts, each read once and followed while the run goes on
run_pages.py           what each page of one run shows, made of those parts
changes.py             which parts of a run have changed since one looked last

followed_table.py      a table of a run: a stream while it goes on, a Parquet file afterwards
metrics.py             the metrics of a run, as arrays that grow
call_log.py            its timeline, as arrays that grow
live.py                what its driver says of rows, groups and memory now
sample_index.py        what can be filtered, sorted and searched of all samples
sample_query.py        filters, searches and orders over them
token_texts.py         the text of each token of a response

cards.py, curves.py    the dozen curves that matter; metrics over an axis, thinned for a screen, and marks
graph_page.py, lanes.py, sample_pages.py, buffer_page.py, workers_page.py, weights_page.py, compare_page.py
                       what each of the other pages shows
comparison.py, sample_difference.py
                       where two runs differ, also for `weft diff`
"""
