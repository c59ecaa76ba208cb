"""The router: places each request on a prefill and a decode worker, again if a worker dies.

fleet.py    load and caches of the workers; pure
stored_prefixes.py  the KV store that workers share; pure
versions.py  which workers may continue an answer, by their weights; pure
messages.py  messages of the actor
actor.py    the actor that owns the fleet: admission, placement, suspects
cache_watch.py  streams of the workers' prefix caches
open_calls.py  calls in flight on a worker, and their end when it is lost
request.py  one request, from admission to its last token, with its retries
sample_stream.py  many requests on one stream
service.py  InferenceService
metrics.py  metrics of a router
"""
