"""Where worker groups run: in this process (`Local`) or on a Ray cluster (`RayBackend`), behind one interface.

The only folder that imports Ray.
"""
