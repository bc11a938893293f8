"""The driver, its schedules, worker groups and placement. The driver handles row ids and
references, never token tensors.

loop/         the loop of a run: admit, dispatch, settle, close
ranks/        code that runs on a rank
backends/     where ranks run: this process or Ray, which only this folder imports
recovery/     checkpoints, resume, failures, elastic groups
reports/      progress, symptoms and trackers
prechecks/    checks, plans and the doctor, before a run starts
planner/      costs of models, and searches for placements and schedules
simulation/   simulated runs, with cost models instead of workers
"""
