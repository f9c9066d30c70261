"""Device kinds and links that can be named without being described, each with its source.

Peaks are dense. Vendors' bandwidths that count both directions are halved. Latencies are on no data
sheet: they are orders of magnitude of a small message under a collective library, to be replaced
by what is measured.
"""

from __future__ import annotations

from hetjax.ir.cluster import DeviceKind, Link

_CUDA = "jax[cuda12] or jax[cuda13]"
# CUDA 13 has no code for Volta, nor have cuDNN 9.11 and later.
_VOLTA = "jax[cuda12], nvidia-cudnn-cu12<9.11"
_ROCM = "jax[rocm]"
_TPU = "jax[tpu]"
_TPU_F32 = (
    "; f32 is a sixth of bf16 (six bf16 passes at Precision.HIGHEST, jax.lax.Precision);"
    " f64 is a 22nd of f32 (double-double add and multiply of 20 and 24 operations, Hida, Li and"
    " Bailey 2001)"
)


def _kind(
    name: str,
    platform: str,
    memory_gb: float,
    bandwidth_gb_s: float,
    tflops: dict[str, float],
    source: str,
    *,
    emulated: tuple[str, ...] = (),
    jaxlib: str = "",
    names: tuple[str, ...] = (),
) -> DeviceKind:
    return DeviceKind(
        name,
        platform,
        round(memory_gb * 1e9),
        bandwidth_gb_s * 1e9,
        tuple((dtype, value * 1e12) for dtype, value in tflops.items()),
        emulated,
        jaxlib,
        names,
        source,
    )


def _tpu(
    name: str,
    memory_gb: float,
    bandwidth_gb_s: float,
    bf16: float,
    i8: float,
    names: tuple[str, ...],
    source: str,
) -> DeviceKind:
    peaks = {"bf16": bf16, "f32": bf16 / 6, "f64": bf16 / 132, "i8": i8}
    return _kind(
        name,
        "tpu",
        memory_gb,
        bandwidth_gb_s,
        peaks,
        source + _TPU_F32,
        emulated=("f16", "f64"),
        jaxlib=_TPU,
        names=names,
    )


_A100 = {"f64": 19.5, "f32": 19.5, "tf32": 156, "f16": 312, "bf16": 312, "i8": 624}
_H100 = {
    "f64": 67,
    "f32": 67,
    "tf32": 494.7,
    "f16": 989.4,
    "bf16": 989.4,
    "f8e4m3fn": 1978.9,
    "f8e5m2": 1978.9,
    "i8": 1978.9,
}
_V100 = {"f64": 7.8, "f32": 15.7, "f16": 125}

_KINDS = (
    _kind(
        "cpu",
        "cpu",
        4,
        10,
        {"f64": 0.025, "f32": 0.05},
        "an order of magnitude for one forced device on a few cores, not a data sheet",
        emulated=("f16", "bf16"),
    ),
    _kind(
        "v100-16g",
        "cuda",
        16,
        900,
        _V100,
        "NVIDIA V100 data sheet (2020), SXM2; bf16 runs as f32",
        emulated=("bf16",),
        jaxlib=_VOLTA,
        names=("V100-SXM2-16GB", "V100-PCIE-16GB"),
    ),
    _kind(
        "v100-32g",
        "cuda",
        32,
        900,
        _V100,
        "NVIDIA V100 data sheet (2020), SXM2; bf16 runs as f32",
        emulated=("bf16",),
        jaxlib=_VOLTA,
        names=("V100-SXM2-32GB", "V100-SXM3-32GB", "V100-PCIE-32GB"),
    ),
    _kind(
        "t4",
        "cuda",
        16,
        320,
        {"f64": 0.25, "f32": 8.1, "f16": 65, "i8": 130},
        "NVIDIA T4 product brief (2020); f64 at 1/32, Turing white paper",
        emulated=("bf16",),
        jaxlib=_CUDA,
        names=("Tesla T4",),
    ),
    _kind(
        "rtx-2080",
        "cuda",
        8,
        448,
        {"f64": 0.314, "f32": 10.1, "f16": 40.3, "i8": 161.1},
        "NVIDIA Turing white paper (2018), reference card, f16 with f32 accumulation; f64 at 1/32",
        emulated=("bf16",),
        jaxlib=_CUDA,
        names=("RTX 2080",),
    ),
    _kind(
        "rtx-2080ti",
        "cuda",
        11,
        616,
        {"f64": 0.42, "f32": 13.4, "f16": 53.8, "i8": 215.2},
        "NVIDIA Turing white paper (2018), reference card, f16 with f32 accumulation; f64 at 1/32",
        emulated=("bf16",),
        jaxlib=_CUDA,
        names=("RTX 2080 Ti",),
    ),
    _kind(
        "titan-rtx",
        "cuda",
        24,
        672,
        {"f64": 0.51, "f32": 16.3, "f16": 130.5, "i8": 261},
        "NVIDIA Titan RTX product page and Turing white paper (2018); f64 at 1/32",
        emulated=("bf16",),
        jaxlib=_CUDA,
        names=("TITAN RTX",),
    ),
    _kind(
        "rtx-3090",
        "cuda",
        24,
        936,
        {"f64": 0.556, "f32": 35.6, "tf32": 35.6, "f16": 71, "bf16": 71, "i8": 284},
        "NVIDIA Ampere GA102 white paper (2020), f16 with f32 accumulation; f64 at 1/64",
        jaxlib=_CUDA,
        names=("RTX 3090",),
    ),
    _kind(
        "rtx-4090",
        "cuda",
        24,
        1008,
        {
            "f64": 1.29,
            "f32": 82.6,
            "tf32": 82.6,
            "f16": 165.2,
            "bf16": 165.2,
            "f8e4m3fn": 330.3,
            "f8e5m2": 330.3,
            "i8": 660.6,
        },
        "NVIDIA Ada white paper (2022), f16 and f8 with f32 accumulation; f64 at 1/64",
        jaxlib=_CUDA,
        names=("RTX 4090",),
    ),
    _kind(
        "l4",
        "cuda",
        24,
        300,
        {
            "f64": 0.47,
            "f32": 30.3,
            "tf32": 60,
            "f16": 121,
            "bf16": 121,
            "f8e4m3fn": 242.5,
            "f8e5m2": 242.5,
            "i8": 242.5,
        },
        "NVIDIA L4 data sheet (2023), halved where it counts sparsity; f64 at 1/64",
        jaxlib=_CUDA,
        names=("NVIDIA L4",),
    ),
    _kind(
        "a100-40g",
        "cuda",
        40,
        1555,
        _A100,
        "NVIDIA A100 data sheet (2021), SXM",
        jaxlib=_CUDA,
        names=("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    _kind(
        "a100-80g",
        "cuda",
        80,
        2039,
        _A100,
        "NVIDIA A100 data sheet (2021), SXM",
        jaxlib=_CUDA,
        names=("A100-SXM4-80GB", "A100 80GB PCIe"),
    ),
    _kind(
        "h100-80g",
        "cuda",
        80,
        3350,
        _H100,
        "NVIDIA H100 data sheet (2023), SXM, halved where it counts sparsity",
        jaxlib=_CUDA,
        names=("NVIDIA H100",),
    ),
    _kind(
        "h200",
        "cuda",
        141,
        4800,
        _H100,
        "NVIDIA H200 data sheet (2024), SXM, halved where it counts sparsity",
        jaxlib=_CUDA,
        names=("NVIDIA H200",),
    ),
    _kind(
        "gh200",
        "cuda",
        96,
        4000,
        _H100,
        "NVIDIA GH200 data sheet (2023), 96 GB HBM3, halved where it counts sparsity",
        jaxlib=_CUDA,
        names=("GH200",),
    ),
    _kind(
        "mi250x",
        "rocm",
        64,
        1638.4,
        {"f64": 47.9, "f32": 47.9, "f16": 191.5, "bf16": 191.5, "i8": 191.5},
        "AMD Instinct MI250X data sheet (2021), matrix, halved: JAX sees each die as a device",
        jaxlib=_ROCM,
        names=("MI250X",),
    ),
    _kind(
        "mi300x",
        "rocm",
        192,
        5300,
        {
            "f64": 163.4,
            "f32": 163.4,
            "f16": 1307.4,
            "bf16": 1307.4,
            "f8e4m3fnuz": 2614.9,
            "f8e5m2fnuz": 2614.9,
            "i8": 2614.9,
        },
        "AMD Instinct MI300X data sheet (2023), matrix peaks",
        jaxlib=_ROCM,
        names=("MI300X",),
    ),
    _tpu("tpu-v4", 32, 1200, 275, 275, ("TPU v4",), "Google Cloud TPU v4 documentation"),
    _tpu(
        "tpu-v5e",
        16,
        819,
        197,
        393,
        ("TPU v5 lite", "TPU v5e"),
        "Google Cloud TPU v5e documentation",
    ),
    _tpu(
        "tpu-v5p", 95, 2765, 459, 918, ("TPU v5", "TPU v5p"), "Google Cloud TPU v5p documentation"
    ),
)

KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in _KINDS}


def _link(name: str, gb_s: float, latency_us: float, source: str, duplex: str = "full") -> Link:
    return Link(name, gb_s * 1e9, latency_us * 1e-6, duplex=duplex, source=source)


_LINKS = (
    _link(
        "shared-memory",
        5,
        20,
        "an order of magnitude for copies between forced CPU devices, not a data sheet",
        "half",
    ),
    _link("pcie3-x16", 15.75, 5, "PCI Express 3.0: 16 lanes of 8 GT/s, 128b/130b; latency assumed"),
    _link("pcie4-x16", 31.5, 5, "PCI Express 4.0: 16 lanes of 16 GT/s, 128b/130b; latency assumed"),
    _link("pcie5-x16", 63, 5, "PCI Express 5.0: 16 lanes of 32 GT/s, 128b/130b; latency assumed"),
    _link("nvlink2", 150, 3, "NVIDIA V100 data sheet: 300 GB/s both ways; latency assumed"),
    _link("nvlink3", 300, 3, "NVIDIA A100 data sheet: 600 GB/s both ways; latency assumed"),
    _link("nvlink4", 450, 3, "NVIDIA H100 data sheet: 900 GB/s both ways; latency assumed"),
    _link(
        "xgmi-mi250x",
        50,
        3,
        "AMD CDNA 2 white paper: one Infinity Fabric link, 100 GB/s both ways; latency assumed",
    ),
    _link(
        "xgmi-mi300x",
        448,
        3,
        "AMD MI300X data sheet: seven links of 128 GB/s both ways; latency assumed",
    ),
    _link(
        "ici-v4", 300, 1, "Google Cloud TPU v4 documentation: 2400 Gbit/s a chip; latency assumed"
    ),
    _link(
        "ici-v5e", 200, 1, "Google Cloud TPU v5e documentation: 1600 Gbit/s a chip; latency assumed"
    ),
    _link(
        "ici-v5p", 600, 1, "Google Cloud TPU v5p documentation: 4800 Gbit/s a chip; latency assumed"
    ),
    _link("infiniband-hdr", 25, 5, "InfiniBand HDR: 200 Gbit/s a port; latency assumed"),
    _link("infiniband-ndr", 50, 5, "InfiniBand NDR: 400 Gbit/s a port; latency assumed"),
    _link("10gbe", 1.25, 50, "IEEE 802.3ae: 10 Gbit/s; latency assumed, one hop over TCP"),
    _link("25gbe", 3.125, 40, "IEEE 802.3by: 25 Gbit/s; latency assumed, one hop over TCP"),
    _link("100gbe", 12.5, 30, "IEEE 802.3ba: 100 Gbit/s; latency assumed, one hop over TCP"),
)

LINKS: dict[str, Link] = {link.name: link for link in _LINKS}

# What joins the devices of a node of this kind unless the description says otherwise.
KIND_LINK: dict[str, str] = {
    "cpu": "shared-memory",
    "v100-16g": "nvlink2",
    "v100-32g": "nvlink2",
    "t4": "pcie3-x16",
    "rtx-2080": "pcie3-x16",
    "rtx-2080ti": "pcie3-x16",
    "titan-rtx": "pcie3-x16",
    "rtx-3090": "pcie4-x16",
    "rtx-4090": "pcie4-x16",
    "l4": "pcie4-x16",
    "a100-40g": "nvlink3",
    "a100-80g": "nvlink3",
    "h100-80g": "nvlink4",
    "h200": "nvlink4",
    "gh200": "nvlink4",
    "mi250x": "xgmi-mi250x",
    "mi300x": "xgmi-mi300x",
    "tpu-v4": "ici-v4",
    "tpu-v5e": "ici-v5e",
    "tpu-v5p": "ici-v5p",
}
