"""The table of devices, read on a machine that has only a CPU."""

import subprocess
import sys

import pytest
import torch

from cp_collectives import Platform, UnsupportedError, current_platform


def test_the_cpu_is_served_by_gloo() -> None:
    platform = current_platform("cpu")
    assert (platform.device_type, platform.backend, platform.process_group_backend) == ("cpu", "gloo", "gloo")


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", "cpu:0"], ids=["device", "type", "type and index"])
def test_a_device_and_its_type_name_the_same_platform(device: torch.device | str) -> None:
    assert current_platform(device) is current_platform(torch.device("cpu"))


def test_cuda_can_be_asked_for_where_there_is_none() -> None:
    platform = current_platform("cuda")
    assert (platform.backend, platform.process_group_backend) == ("nccl", "cpu:gloo,cuda:nccl")
    assert platform.device(3) == torch.device("cuda", 3)


def test_npu_can_be_asked_for_before_its_extension_is_loaded() -> None:
    code = (
        "from cp_collectives import current_platform; platform = current_platform('npu'); "
        "assert platform.process_group_backend == 'cpu:gloo,npu:hccl'; assert platform.extension == 'torch_npu'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device_type", ["meta", "xpu", "tpu"])
def test_an_unknown_device_type_is_refused_with_the_choices(device_type: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"no device type '{device_type}'; supported are cpu, cuda, npu\."):
        current_platform(device_type)


def test_a_machine_without_an_accelerator_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert current_platform().device_type == "cpu"


def test_an_accelerator_that_was_only_built_in_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert current_platform().device_type == "cpu"


def test_an_accelerator_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert current_platform().backend == "nccl"


def test_the_cpu_platform_calls_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the CPU platform asked for a device")

    monkeypatch.setattr(torch.accelerator, "set_device_index", refuse)
    monkeypatch.setattr(torch, "get_device_module", refuse)
    platform, device = current_platform("cpu"), torch.device("cpu")
    platform.load()
    platform.set_device(device)
    platform.reset_peak_memory(device)
    assert platform.device(1) == device
    assert platform.peak_memory_bytes(device) > 2**20


def test_an_accelerator_is_read_through_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Module:
        def reset_peak_memory_stats(self, device: torch.device) -> None:
            calls.append(("reset", device))

        def max_memory_allocated(self, device: torch.device) -> int:
            return 7

    monkeypatch.setattr(torch, "get_device_module", lambda device_type: Module())
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: calls.append(("set", device)))
    platform, device = current_platform("cuda"), torch.device("cuda", 1)
    platform.set_device(device)
    platform.reset_peak_memory(device)
    assert calls == [("set", device), ("reset", device)]
    assert platform.peak_memory_bytes(device) == 7


def test_load_imports_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform(device_type="x", backend="y", process_group_backend="z", extension="colorsys")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    platform.load()
    assert "colorsys" in sys.modules


def test_manual_seed_repeats_random_numbers() -> None:
    platform = current_platform("cpu")
    platform.manual_seed(11)
    first = torch.rand(3)
    platform.manual_seed(11)
    assert torch.equal(first, torch.rand(3))


def test_states_of_the_generators_repeat_random_numbers() -> None:
    platform, device = current_platform("cpu"), torch.device("cpu")
    states = platform.rng_states(device)
    first = torch.rand(3)
    platform.set_rng_states(states, device)
    assert torch.equal(first, torch.rand(3))


def test_an_accelerators_generator_is_read_and_set_beside_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        state = torch.tensor([1])

        def get_rng_state(self, device: torch.device) -> torch.Tensor:
            return self.state

        def set_rng_state(self, new_state: torch.Tensor, device: torch.device) -> None:
            self.state = new_state

    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    platform, device = current_platform("cuda"), torch.device("cuda", 1)
    states, first = platform.rng_states(device), torch.rand(3)
    module.state = torch.tensor([2])
    platform.set_rng_states(states, device)
    assert int(module.state) == 1
    assert torch.equal(first, torch.rand(3))
