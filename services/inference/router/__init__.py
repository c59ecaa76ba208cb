"""The router: places each request on a prefill and a decode worker, again if a worker dies.

fleet/: the workers as one router knows them; pure, except open_calls.py
    workers.py          a worker's announcement, load and cache
    costs.py            rates by engine
    needs.py            engines that can begin and continue a request
    versions.py         workers that may continue an answer, by their weights
    canary.py           the share of an engine under trial
    stored_prefixes.py  the KV store that workers share
    open_calls.py       calls in flight on a worker, and their end when it is lost
    fleet.py            the placement on all workers
request/: one request, from admission to its last token
    request.py       the whole of it, with its retries
    attempt.py       one attempt, on one or two workers
    worker_calls.py  the calls of an attempt, and their errors
    answer.py        its tokens so far, and what continues them
    lost_workers.py  the workers that it has lost
actor.py          owns the fleet: admission, placement, suspects
messages.py       messages of the actor
cache_watch.py    streams of the workers' prefix caches
service.py        InferenceService
sample_stream.py  many requests on one stream
worker_streams.py  calls to workers, many on one stream
sample_span.py    the span of one answer
role.py           wiring
metrics.py        metrics of a router
"""
