"""Real workers that die while a prompt goes from one to the other in blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator
from tests.contract import engines
from tests.contract.engines import is_greedy, prompt_ids, published, reference
from tests.support.inference.cluster import InferenceCluster
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.scrape import scraped

MOST = 8
