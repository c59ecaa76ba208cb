"""Gateway: chat protocols for agents, exact tokens for the record.

Layers, each of which imports only lower ones: `http` and `service`, `turns`, `sessions` and
`actors`, `structured_output`, `conversation`, `model`; `router` is beside the last three.
"""
