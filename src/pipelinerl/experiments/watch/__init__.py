"""`pipelinerl watch`: a live page on runs, also finished ones, and several side by side.

follow.py    growing files, read from where the last look ended; curves with a bounded number of points
newest.py    the newest groups, as text in spans of weight versions
run.py       the state of one run, and what of it a page has not seen yet
server.py    the page, the runs and the events over HTTP; who may read them
beside.py    the same in a process beside `pipelinerl train`

It only reads: the records, and the status boards of the run directory. The page is in `assets/watch`.
"""
