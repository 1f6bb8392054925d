"""Each kernel a few times on small inputs: what a memory or race checker runs (it is slow, so this is short)."""

from __future__ import annotations

import torch

from microspec_hf import ops
from tests.cuda_kernels import test_parity as parity


def main() -> None:
    device = torch.device("cuda")
    tiers = set(ops.status(device).values())
    assert tiers <= {"path", "hub", "local"}, f"the kernels are not all compiled ones: {tiers}"
    selection, tree, window = parity.TestSelection(), parity.TestBuildTree(), parity.TestWindowUpdate()
    selection.test_draft_topk(device, torch.bfloat16, 3072, 10)
    selection.test_draft_topk(device, torch.float32, 131, 10)
    selection.test_topk_candidates(device, torch.bfloat16, 50257, 3)
    selection.test_topk_candidates(device, torch.float16, 65544, 20)
    tree.test_random_rounds(device, 10, 5, 60, True)
    tree.test_random_rounds(device, 20, 9, 64, False)
    gather = parity.TestGatherRows()
    for width in ((), (3,), (896,), (4096,)):
        gather.test_rows(device, torch.bfloat16, width, torch.int64)
    for stream in (False, True):
        window.test_long_runs(device, 4000, 100, 4, 240, stream)
        window.test_long_runs(device, 4000, 1025, 0, 240, stream)
    compact = parity.TestCompactKV()
    compact.test_paths(device, torch.bfloat16, 8, 128)
    compact.test_near_the_end(device)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
