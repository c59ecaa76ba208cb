"""The windowed FIFO over groups: one instance leads, the others stand by.

Layers, each imports only those after it: `service`, `leadership`, `actors`, `state`.
"""
