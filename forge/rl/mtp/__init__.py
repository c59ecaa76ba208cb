"""Multi-token prediction: draft heads, trained beside the policy without an effect on it.

`heads` has the modules, `losses` the losses of drafts, `training` the heads' gradient and
optimizer. The policy's backbone, embedding and head are read and never differentiated.
"""
