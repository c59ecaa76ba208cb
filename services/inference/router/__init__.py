"""The router: places each request on a prefill and a decode worker, again if a worker dies.

workers.py  what a worker announces, its load and its cache; pure
costs.py    rates by engine; pure
needs.py    which engines can begin and continue a request; pure
canary.py   the share of an engine under trial; pure
fleet.py    the placement on all workers; pure
stored_prefixes.py  the KV store that workers share; pure
versions.py  which workers may continue an answer, by their weights; pure
messages.py  messages of the actor
actor.py    the actor that owns the fleet: admission, placement, suspects
cache_watch.py  streams of the workers' prefix caches
open_calls.py  calls in flight on a worker, and their end when it is lost
answer.py   the tokens of one request, and what continues them
request.py  one request, from admission to its last token, with its retries
sample_stream.py  many requests on one stream
service.py  InferenceService
metrics.py  metrics of a router
"""
