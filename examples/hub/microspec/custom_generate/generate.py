"""MicroSpec as a `custom_generate` repository: everything is in the package `microspec_hf`."""

from typing import Any

import microspec_hf


def generate(model: Any, drafter: Any = None, microspec: Any = None, **generate_arguments: Any) -> Any:
    """`model.generate(...)` with lossless speculative decoding; see `microspec_hf.run`.

    Args:
        model: the target.
        drafter: Hub id or folder of an EAGLE head, an `EagleHead`, or "auto" for a known target.
        microspec: a `microspec_hf.MicroSpecConfig` or a dict of its fields.
        generate_arguments: as for `generate`.
    """
    return microspec_hf.run(model, drafter=drafter, microspec=microspec, **generate_arguments)
