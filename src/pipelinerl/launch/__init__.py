"""From a configuration to a finished run: the only place that names concrete classes of every stage.

run.train
  checks.check_before_the_start      devices, memory, environment
  run_directory, resume              the directory, its lock, and where the session starts
  session.Session                    the decisions that all processes of the session share
  hosts.processes.run_processes      starts the processes of `roles`, watches and stops them
    hosts.worker.main                in each process: runs the stages of its role
      stages.generation, stages.training, stages.preprocessing, stages.servers
  hosts.embedded.run_embedded        or: the same stages in this process
  run.write_summary, show_result     summary.json, curves, the table
"""

GARBAGE_THRESHOLD = 50_000  # with the default, 700, imports take a fifth longer, and rollouts trigger 10 a second
