"""The windowed FIFO over groups: one instance leads, the others stand by."""
