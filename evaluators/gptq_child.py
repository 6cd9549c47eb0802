"""The child process of gptq_format.py: gptqmodel quantises a saved model and packs it.

`ENVIRONMENT/bin/python gptq_child.py REQUEST.json` runs in an environment of its own (`make gptq-env`): gptqmodel pins
another numpy and changes threads and transformers when it is imported. Nothing of ours is imported here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> None:
    """request   model, target: folders;  calibration: .npy of ids (S, T);  bits, group_size (-1: the row), sym, damp"""
    import numpy as np
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.models.auto import MODEL_MAP
    from gptqmodel.models.definitions.llama import LlamaQModel

    torch.set_num_threads(1)
    MODEL_MAP.setdefault("olmo", LlamaQModel)  # the same names and order of matrices
    config = QuantizeConfig(
        bits=request["bits"],
        group_size=request["group_size"],
        sym=request["sym"],
        desc_act=False,
        act_group_aware=False,
        damp_percent=request["damp"],
        offload_to_disk=False,
        pack_impl="original",
    )
    model = GPTQModel.load(request["model"], config, device="cpu", dtype=torch.float32)
    ids_ST = torch.from_numpy(np.load(request["calibration"]))
    model.quantize([{"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])} for ids in ids_ST])
    model.save(request["target"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
