"""`pipelinerl watch`: a live page on runs, also finished ones, and several side by side; and the same page as one file.

shown.py     the newest groups, as text in spans of weight versions
run.py       the state of one run, and what of it a page has not seen yet
page.py      the page with its data in it: reports of runs and of experiments
server.py    the page, the runs and the events over HTTP; who may read them; the same beside `pipelinerl train`

It only reads: the records, and the status boards of the run directory. The page is in `assets/watch`.
"""
