"""The driver, its schedules, worker groups, dispatch and placement.

Only this folder imports Ray. It moves row ids and references, never token tensors.
"""
