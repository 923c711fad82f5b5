"""Peak rates of GPUs in 10^12 dense operations a second, as NVIDIA's data sheets state them.

Sheets: "NVIDIA H100 Tensor Core GPU", "NVIDIA H200 Tensor Core GPU", "NVIDIA A100 Tensor Core GPU",
"NVIDIA V100", "NVIDIA T4", "NVIDIA A10", "NVIDIA L4", "NVIDIA L40S". The rates of the H100 (SXM and
PCIe), H200, A100, V100 (SXM2 and PCIe), T4, L4 and L40S, and the A10's float32, agree with other
publications. Those of the H100 NVL, H200 NVL and V100S, and the A10's tensor cores, do not rest on
a second source: compare them with a sheet before you rely on a share of them. Rates with sparsity
are halved. float32 is that of the CUDA cores; the others are those of the tensor cores, with sums
in float32.
"""

_HOPPER = {"float32": 67.0, "tf32": 494.5, "float16": 989.5, "bfloat16": 989.5}
_AMPERE = {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}

# Part of a device's name, and its rates; an earlier part goes first.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("RTX", {}),  # such as the RTX A1000, which is no A100
    ("T400", {}),
    ("H100 PCIe", {"float32": 51.0, "tf32": 378.0, "float16": 756.5, "bfloat16": 756.5}),
    ("H100 NVL", {"float32": 60.0, "tf32": 417.5, "float16": 835.5, "bfloat16": 835.5}),
    ("H100", _HOPPER),
    ("H200 NVL", {"float32": 60.0, "tf32": 417.5, "float16": 835.5, "bfloat16": 835.5}),
    ("H200", _HOPPER),
    ("A100", _AMPERE),
    ("V100S", {"float32": 16.4, "float16": 130.0}),
    ("V100-PCIE", {"float32": 14.0, "float16": 112.0}),
    ("V100-FHHL", {}),  # slower than the others
    ("V100", {"float32": 15.7, "float16": 125.0}),
    ("T4", {"float32": 8.1, "float16": 65.0}),
    ("A10G", {}),  # another GPU than the A10
    ("A10-", {}),  # a part of an A10
    ("A10", {"float32": 31.2, "tf32": 62.5, "float16": 125.0, "bfloat16": 125.0}),
    ("L40S", {"float32": 91.6, "tf32": 183.0, "float16": 362.0, "bfloat16": 362.0}),
    ("L40", {}),
    ("L4", {"float32": 30.3, "tf32": 60.0, "float16": 121.0, "bfloat16": 121.0}),
)


def peak_of(device: str, precision: str) -> float | None:
    """Returns a device's peak rate in operations a second; None if it is not in the table.

    Args:
      device: Name as the driver gives it, such as "NVIDIA H100 80GB HBM3".
      precision: "float32", "tf32", "mixed_float16" or "mixed_bfloat16".
    """
    for part, rates in PEAKS:
        if part in device:
            rate = rates.get(precision.removeprefix("mixed_"))
            return None if rate is None else rate * 1e12
    return None
