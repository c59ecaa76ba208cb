"""The trained weights, full or LoRA, and the device and type they compute in."""
