"""Is there an NPU that computes? Run in a process of its own: a broken installation can abort it.

Prints one sentence and exits with 0 only if a kernel ran on an NPU and its result was right. Every other state has an
exit status of its own.
"""

import importlib.util
import os
import sys

ABSENT, BROKEN, NO_DEVICE, TOO_FEW_DEVICES, WRONG_KERNEL, SIMULATOR = range(10, 16)


def main(num_devices: int) -> tuple[int, str]:
    """Return exit status and sentence.

    Args:
        num_devices: How many devices the caller needs.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return ABSENT, "torch_npu is not installed: install the extra 'npu' of cp-collectives on a host with an NPU."
    # Else torch's own import fails before anything can be told apart.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch
        import torch_npu
    except ImportError as error:
        return BROKEN, f"torch_npu is installed but broken: {error}; source set_env.sh of CANN in this shell first."
    if getattr(torch_npu, "IS_SIMULATOR", False) or os.environ.get("NPU_SIM"):
        return SIMULATOR, "this torch_npu runs on a simulated runtime, which is no evidence for an NPU."
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "npu":
        return NO_DEVICE, "torch_npu is installed, but there is no NPU device: check the driver and npu-smi info."
    found = torch.accelerator.device_count()
    if found < num_devices:
        return TOO_FEW_DEVICES, f"these tests need {num_devices} NPU devices, but there are {found}."
    expected = torch.arange(12.0).view(3, 4) @ torch.arange(12.0).view(4, 3)
    result = (torch.arange(12.0).view(3, 4).to(accelerator) @ torch.arange(12.0).view(4, 3).to(accelerator)).cpu()
    if not torch.equal(result, expected):
        return WRONG_KERNEL, f"a matrix product on the NPU is wrong: {result.tolist()} instead of {expected.tolist()}."
    return 0, f"{found} NPU devices are ready."


if __name__ == "__main__":
    status, sentence = main(num_devices=int(sys.argv[1]))
    print(sentence)
    sys.exit(status)
