"""For tests of the gateway: chat templates, scripted engines, real processes around it."""
