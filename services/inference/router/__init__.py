"""The router: places each request on a prefill and a decode worker, and outlives both.

fleet.py    what is known of the workers; pure
actor.py    the actor that owns it: admission, placement, suspicion
request.py  one request, from admission to its last token, over the deaths of workers
sample_stream.py  many requests on one stream
service.py  InferenceService
metrics.py  what a router counts
"""
