"""`/openapi.json`, and requests that schemathesis makes from it: what is described is what happens."""

from collections.abc import Iterator, Set
from copy import deepcopy
from functools import cache
from typing import Any

import httpx2 as httpx
import pytest
from helpers.served import Served, served

from llorch.apps.serve.app import ROUTES
from llorch.apps.serve.openapi import Described, description
from llorch.apps.serve.requests import Body

EXAMPLES = 25  # of each route
INPUTS = ("prompt", "messages", "tokens")  # one of them
# Limits that must be the same, and variables that the template of this model does not have.
ONE_IN_MANY = (
    "n_predict", "num_predict", "max_new_tokens", "max_completion_tokens", "enable_thinking", "think",
    "reasoning_effort", "reasoning",
)  # fmt: skip


@cache
def described() -> dict[str, Any]:
    return description(ROUTES, version="1")


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(deepcopy(described()))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("micro-llama", context=64) as running:
        yield running


def test_every_route_is_described():
    assert set(described()["paths"]) == {one.path for one in ROUTES}


def test_it_is_served(server: Served):
    found = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    assert found["openapi"] == "3.1.0"
    assert found == described()


def make_sound(body: dict[str, Any], fields: Set[str]) -> None:
    """Change what a schema cannot say, so that some requests have an answer."""
    for name in ONE_IN_MANY:
        body.pop(name, None)
    body |= {"model": "micro-llama"} | dict.fromkeys({"max_tokens", "max_output_tokens"} & fields, 2)
    if fields >= {*INPUTS}:
        given = next((name for name in INPUTS if body.get(name)), None)
        body |= {"prompt": "Once"} if given is None else dict.fromkeys({*INPUTS} - {given})
    for message in body.get("messages") or ():
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "Once"


@pytest.mark.nightly_cases("/v1/chat/completions", "/v1/responses")
@pytest.mark.parametrize("route", ROUTES, ids=lambda one: one.path)
def test_what_is_described_is_what_happens(server: Served, schema: Any, route: Described):
    import schemathesis  # which takes a second
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    operation = schema[route.path][route.method]
    statuses = set()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES if route.asked else 2, derandomize=True, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and route.asked is not None and issubclass(route.asked, Body):
            make_sound(case.body, route.asked.model_fields.keys())
        answer = case.call(base_url=server.url)
        statuses.add(answer.status_code)
        case.validate_response(
            answer, checks=[not_a_server_error, status_code_conformance, response_schema_conformance]
        )

    run()
    assert 200 in statuses
