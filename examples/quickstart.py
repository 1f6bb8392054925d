"""The same text, sooner: one argument more in `generate`.

python examples/quickstart.py
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from microspec_hf.models import smollm2

folder = smollm2()  # SmolLM2-135M-Instruct; any Hub id or folder does
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
inputs: Any = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Explain why the moon has phases."}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
tree = "auto"  # measures this machine once; leave it out on a GPU
speculation = {"custom_generate": "microspec", "drafter": "auto", "microspec": {"tree": tree}}

output: Any = None
for name, arguments in {"plain": {}, "MicroSpec": speculation}.items():
    model.generate(**inputs, max_new_tokens=8, **arguments)  # warm-up
    started = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=64, return_dict_in_generate=True, **arguments)
    seconds = time.perf_counter() - started
    new_ids = output.sequences[0, inputs["input_ids"].shape[1] :]
    print(f"{name}, {len(new_ids) / seconds:.1f} tokens a second:")
    print(tokenizer.decode(new_ids, skip_special_tokens=True))

(stats,) = output.stats
print(f"{stats.acceptance_length:.2f} tokens a pass,", end=" ")
print(f"{stats.mean_active_vocabulary:.0f} of {model.config.vocab_size} tokens scored by the drafter")
