"""What several tests share: conformance suites, fault injection, parity helpers."""

import pytest

for _name in ("engine_conformance", "engine_faults", "engine_handles", "engine_life", "engine_tools"):
    pytest.register_assert_rewrite(f"tests.support.{_name}")
