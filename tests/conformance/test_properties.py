"""Anything that hypothesis thinks of, on every kernel that is usable here."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from int8moe import list_kernels
from int8moe.testing import Target, make_experts
from int8moe.testing.strategies import configs, hidden_states, routings

KERNELS = [row.name for row in list_kernels() if row.available]


@pytest.mark.parametrize("kernel", KERNELS)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_call_has_the_bits_of_the_reference(kernel, data):
    target = Target(kernel, threads=(1, 2))
    config = data.draw(configs(largest=80, activations=target.activations))
    experts = make_experts(config, seed=data.draw(st.integers(0, 99)))
    x = data.draw(hidden_states(config))
    weights, ids = data.draw(routings(config, len(x)))
    if x.dtype in target.dtypes and not config_needs_more(target, config):
        target.check(target.layer(config, experts), experts, (x, weights, ids))


def config_needs_more(target: Target, config) -> bool:
    wanted = {"bias": config.has_bias, "apply_router_weight_on_input": config.apply_router_weight_on_input}
    return any(needed and feature not in target.spec.features for feature, needed in wanted.items())
