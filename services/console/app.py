"""Wiring of a console instance: topics, sources, HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from forge.client.operator import Operator
from forge.client.stored.pool import PoolReader
from forge.client.stored.token_values import TokenValuesReader
from forge.client.weights import WeightSteering
from forge.runtime.process.service import ServiceContext
from forge.v1 import pool_pb2
from services.console.config import ConsoleConfig
from services.console.data.compared_runs import ComparedRuns
from services.console.data.overview import Overview
from services.console.data.queue_view import QueueView
from services.console.data.services_view import ServicesView
from services.console.data.steps import Steps
from services.console.data.tasks_view import TasksView
from services.console.data.topics import News, Poll, Topic
from services.console.data.trajectories.closes import Closes
from services.console.data.trajectories.token_texts import TokenTexts
from services.console.data.trajectories.token_values import TokenValuesCache
from services.console.data.trajectories.trajectory_cache import TrajectoryCache
from services.console.data.trajectories.trajectory_list import TrajectoryList
from services.console.data.weights_view import read_weights
from services.console.http.access import AccessRules
from services.console.http.actions import Actions
from services.console.http.events import Viewers
from services.console.http.server import DataSources, HttpServer


class ConsoleApp:
    """One console instance. It has no gRPC service of its own and no state to lose."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def start(self) -> None:
        """Serves the page."""
        config = self._context.config
        assert isinstance(config, ConsoleConfig)
        context = self._context
        # No retries: a page shows that a service is away, and reads again.
        operator = Operator(context.coordinator, context.channels, retry_for_s=0.0, find_s=1.0)
        reader = PoolReader(context.coordinator, context.channels, retry_for_s=0.0)
        steering = WeightSteering(context.coordinator, context.channels, retry_for_s=0.0)
        queue, tasks, news = QueueView(operator), TasksView(operator, reader), News()
        topics = self._topics(operator, reader, steering, queue, tasks, news)
        texts = await asyncio.to_thread(TokenTexts.load, config.model_path)
        for topic in topics.values():
            context.keep_running(topic.run(), name=f"topic-{topic.name}")
        values = TokenValuesReader(
            context.coordinator, context.channels, timeout_s=config.call_timeout_s
        )
        sources = DataSources(
            viewers=Viewers(topics, news, most=config.http.max_viewers),
            queue=queue,
            trajectories=TrajectoryList(reader),
            tasks=tasks,
            cache=TrajectoryCache(reader.find, most_bytes=config.max_cache_mib * (1 << 20)),
            texts=texts,
            values=TokenValuesCache(values.read),
            compared=ComparedRuns(config.compare, most=config.max_steps),
            actions=Actions(
                operator,
                steering,
                context.coordinator,
                context.channels,
                timeout_s=config.action_timeout_s,
            ),
        )
        access = AccessRules(config, context.security)
        self._http = HttpServer(config, access, sources)
        tls = context.security.http_context(config.host)
        port = await self._http.start(tls)
        host = config.advertise_host or config.host
        context.metadata["http"] = f"{host}:{port}"

    async def drain(self) -> None:
        """Ends all pages; browsers connect again, to this instance's successor."""
        await self._http.stop()

    async def stop(self) -> None:
        """The same as `drain`."""
        await self._http.stop()

    def _topics(
        self,
        operator: Operator,
        reader: PoolReader,
        steering: WeightSteering,
        queue: QueueView,
        tasks: TasksView,
        news: News,
    ) -> dict[str, Topic]:
        context, config = self._context, self._context.config
        call_s = config.call_timeout_s
        services = ServicesView(
            context.coordinator, context.channels, reader, cluster=config.cluster
        )
        overview = Overview(operator, cluster=config.cluster)
        polls: dict[str, tuple[Callable[[], Awaitable[Any]], float, float]] = {
            "overview": (overview.read, config.poll_s, 2 * call_s),
            "queue": (queue.read, config.poll_s, 2 * call_s),
            "weights": (partial(read_weights, steering), config.poll_s, 2 * call_s),
            "services": (services.read, config.services_poll_s, 4 * call_s),
            "tasks": (tasks.read, config.services_poll_s, config.fetch_timeout_s),
        }
        return {
            "steps": Steps(
                news, lambda after: operator.tail(after_step=after), most=config.max_steps
            ),
            "closes": Closes(news, lambda: reader.tail(pool_pb2.TrajectoryFilter(), cursors={})),
        } | {
            name: Poll(name, news, read, period_s=period_s, timeout_s=timeout_s)
            for name, (read, period_s, timeout_s) in polls.items()
        }
