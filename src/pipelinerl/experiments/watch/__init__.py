"""`pipelinerl watch`: a live page on runs, also finished ones, and several side by side; and the same page as one file.

page.py      the state of a run, and what of it a page has not seen yet; the page with its data in it
server.py    the page, the runs and the events over HTTP; who may read them; the same beside `pipelinerl train`

It only reads: the records, and the status boards of the run directory. The page is in `assets/watch`.
"""
