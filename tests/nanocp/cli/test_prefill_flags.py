"""`nanocp prefill-flags`: what vLLM is started with; of states more, or a refusal."""

import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from harness.programs.command_line import nanocp


@pytest.fixture
def flags(tmp_path):
    def printed(preset):
        make_checkpoint(tmp_path, preset)
        return nanocp("prefill-flags", tmp_path)

    return printed


@pytest.mark.parametrize(("preset", "is_more"), [("tiny", False), ("tiny-qwen3-next", True)])
def test_a_model_with_states_gets_the_flags_that_the_connector_asks_for(flags, preset, is_more):
    result = flags(preset)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("--dtype float32 --kv-transfer-config.kv_connector Nanocp")
    more = "--mamba-ssm-cache-dtype float32 --no-enable-prefix-caching"
    assert result.output.endswith(f" {more}\n") is is_more


def test_states_that_vllm_does_not_send_are_refused(flags):
    result = flags("tiny-kimi-linear")
    assert result.exit_code == 2
    assert "Kimi Delta Attention" in result.output and "NanoCP's own prefill" in result.output
