"""transformers says a lot about unusual options; here they are the subject."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)
