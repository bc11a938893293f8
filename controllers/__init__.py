"""Who decides: the driver, its schedules, worker groups, dispatch protocols and resource pools.

The only floor that knows Ray. It moves row ids and references, never token tensors, and it does not know how weights
travel.
"""
