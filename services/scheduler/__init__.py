"""The windowed FIFO over groups: one instance leads, the others stand by.

Floors, each of which imports only what is below: `service`, `leadership`, `actors`, `state`.
"""
