"""The generation queue: which group is sampled next, which groups make a batch, which are trained.

`generation_queue` is its interface; time is passed in.
"""
