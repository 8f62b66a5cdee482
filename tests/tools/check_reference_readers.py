#!/usr/bin/env python3
"""Are the quantized files of this project what other projects read, and the other way round?

    python3 tests/tools/check_reference_readers.py --cachalot build/cpu/bin/cachalot --model build/cpu/testdata/tiny-v2 \\
        --dense build/cpu/testdata/golden/qwen2 --gguf-model build/cpu/testdata/tiny-v3

Ours to theirs: `cachalot quantize` writes the model in each format; the format's own package unpacks every quantized tensor, and the
values must be those that `cachalot convert --type f32` reads from the same directory, bit for bit (products of f16 scales are taken in f32).
Theirs to ours: the packages' own packers write the model's linear layers; cachalot must read the values that the packages read.

Packages, each optional (what is missing is said and skipped): numpy, gguf, safetensors and torch for all; compressed-tensors, autoawq,
auto-gptq, gptqmodel for their formats; transformers to load a whole directory (--dense); llama-cpp-python to load the GGUF file. Of autoawq and auto-gptq single modules are loaded, as the
packages themselves refuse to be imported beside newer transformers.
"""
import argparse
import importlib
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types

try:
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError as error:
    sys.exit(f"needs numpy, gguf, safetensors and torch: {error}")

FAILED = []


def report(name, text, good=True):
    print(f"{'ok  ' if good else 'FAIL'}  {name}: {text}", flush=True)
    if not good:
        FAILED.append(name)


def skip(name, why):
    print(f"skip  {name}: {why}", flush=True)


def bare_package(name, *folders):
    """A package whose own __init__ is not run, so that single modules of it can be."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"{name} is not installed")
    root = list(spec.submodule_search_locations)[0]
    for module, path in [(name, root)] + [(f"{name}.{f}", f"{root}/{f.replace('.', '/')}") for f in folders]:
        stub = types.ModuleType(module)
        stub.__path__ = [path]
        sys.modules.setdefault(module, stub)


def load_awq():
    bare_package("awq", "modules", "modules.linear", "utils")
    return importlib.import_module("awq.modules.linear.gemm"), importlib.import_module("awq.utils.packing_utils")


def load_auto_gptq():
    bare_package("auto_gptq", "nn_modules", "nn_modules.qlinear")
    return importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear


def load_gptqmodel():
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
    return TorchLinear, convert_gptq_v1_to_v2_format_module


def load_compressed():
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    return PackedQuantizationCompressor, QuantizationArgs, QuantizationScheme


def run(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()[-400:]}")


def tensors_of(directory):
    out = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                out[name] = file.get_tensor(name)
    return out


class Ours:
    """The values that cachalot reads from a directory, through its f32 GGUF file."""

    def __init__(self, cachalot, directory, scratch):
        path = scratch / (pathlib.Path(directory).name + ".f32.gguf")
        run([cachalot, "convert", "-m", directory, "-o", path, "--type", "f32"])
        self.config = json.loads((pathlib.Path(directory) / "config.json").read_text())
        self.tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}
        path.unlink()

    def weight(self, module):
        """[out, in] of a Hugging Face module, or None where the converter changed the rows."""
        parts = module.split(".")
        if parts[0] == "lm_head":
            return self.tensors.get("output.weight")
        layer, rest = parts[2], ".".join(parts[3:])
        names = {"self_attn.q_proj": "attn_q", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
                 "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
                 "self_attn.o_proj": "attn_output"}
        if rest in names:
            if self.config["model_type"] == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                return None
            return self.tensors[f"blk.{layer}.{names[rest]}.weight"]
        if rest == "self_attn.kv_b_proj":
            k, v = self.tensors[f"blk.{layer}.attn_k_b.weight"], self.tensors[f"blk.{layer}.attn_v_b.weight"]
            return np.concatenate([np.concatenate([k[h].T, v[h]]) for h in range(k.shape[0])])
        kind = parts[-1].split("_")[0]
        if "experts" in parts:
            return self.tensors[f"blk.{layer}.ffn_{kind}_exps.weight"][int(parts[parts.index("experts") + 1])]
        if "shared_experts" in parts:
            return self.tensors[f"blk.{layer}.ffn_{kind}_shexp.weight"]
        return self.tensors[f"blk.{layer}.ffn_{kind}.weight"]


def compare(name, ours, theirs):
    """theirs: module -> f32 [out, in]"""
    n, worst = 0, 0.0
    for module, value in theirs.items():
        mine = ours.weight(module)
        if mine is None:
            continue
        n += 1
        if mine.shape != tuple(value.shape):
            return report(name, f"{module}: {mine.shape} here, {tuple(value.shape)} there", False)
        worst = max(worst, float(np.abs(mine - value.numpy()).max()))
    report(name, f"{n} matrices, largest difference {worst}", n > 0 and worst == 0.0)


def modules_with(tensors, ending):
    return sorted(name[: -len(ending)] for name in tensors if name.endswith(ending))


# ---- reading: the packages' unpackers on a directory's tensors, scales widened to f32 so that products are exact ----

def read_awq(tensors, config):
    _, packing = load_awq()
    group = config["group_size"]
    return {m: packing.dequantize_gemm(tensors[m + ".qweight"], tensors[m + ".qzeros"], tensors[m + ".scales"].float(), 4,
                                       group if group > 0 else tensors[m + ".qweight"].shape[0]).T.contiguous()
            for m in modules_with(tensors, ".qweight")}


def gptq_shape(tensors, module, bits):
    return tensors[module + ".qweight"].shape[0] * 32 // bits, tensors[module + ".scales"].shape[1]


def bits_of(tensors, module):
    """From the shapes, as "dynamic" may give modules bits of their own."""
    return 32 * tensors[module + ".qweight"].shape[0] // tensors[module + ".g_idx"].shape[0]


def read_auto_gptq(tensors, config):
    linear = load_auto_gptq()
    out = {}
    for m in modules_with(tensors, ".qweight"):
        bits = bits_of(tensors, m)
        inputs, outputs = gptq_shape(tensors, m, bits)
        layer = linear(bits, inputs // tensors[m + ".scales"].shape[0], inputs, outputs, False)
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            getattr(layer, part).copy_(tensors[f"{m}.{part}"])
        # Products with unit vectors are the weights; in f32, as the layer does when it has no CUDA kernels.
        layer.scales = layer.scales.float()
        out[m] = layer(torch.eye(inputs)).T.contiguous()
    return out


def read_gptqmodel(tensors, config):
    linear, from_v1 = load_gptqmodel()
    out = {}
    for m in modules_with(tensors, ".qweight"):
        bits = bits_of(tensors, m)
        inputs, outputs = gptq_shape(tensors, m, bits)
        layer = linear(bits=bits, group_size=inputs // tensors[m + ".scales"].shape[0], desc_act=False, sym=False, in_features=inputs,
                       out_features=outputs, bias=False, pack_dtype=torch.int32)
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            getattr(layer, part).copy_(tensors[f"{m}.{part}"])
        if config.get("checkpoint_format", "gptq") == "gptq":
            from_v1(layer, bits=bits, pack_dtype=torch.int32)
        layer.scales = layer.scales.float()
        out[m] = layer.dequantize_weight().float().T.contiguous()
    return out


def read_compressed(tensors, config):
    compressor, arguments, scheme_type = load_compressed()
    out = {}
    for m in modules_with(tensors, ".weight_packed"):
        packed, scale = tensors[m + ".weight_packed"], tensors[m + ".weight_scale"]
        inputs = int(tensors[m + ".weight_shape"][1])
        zero = tensors.get(m + ".weight_zero_point")
        grouped = scale.shape[1] > 1
        weights = arguments(num_bits=packed.shape[1] * 32 // inputs, type="int", symmetric=zero is None,
                            strategy="group" if grouped else "channel", group_size=inputs // scale.shape[1] if grouped else None)
        state = {"weight_packed": packed, "weight_scale": scale.float(), "weight_shape": tensors[m + ".weight_shape"]}
        if zero is not None:
            state["weight_zero_point"] = zero
        out[m] = compressor.decompress(state, scheme_type(targets=["Linear"], weights=weights))["weight"].float()
    return out


def read_fp8(tensors, config):
    """The rule of DeepSeek's own scripts: every block of 128 x 128 times its scale."""
    out = {}
    for m in modules_with(tensors, ".weight_scale_inv"):
        weight, scale = tensors[m + ".weight"].float(), tensors[m + ".weight_scale_inv"]
        grid = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out[m] = weight * grid[: weight.shape[0], : weight.shape[1]]
    return out


# ---- writing: the packages' packers on the model's linear layers ----

def ranges(weight, group, bits, symmetric):
    """Scales and zero points [out, groups] by smallest and largest value."""
    w = weight.reshape(weight.shape[0], -1, group)
    top = 2**bits - 1
    if symmetric:
        scale = (w.abs().amax(2) * 2 / top).clamp(min=1e-5)
        return scale.half().float(), torch.full_like(scale, 2 ** (bits - 1))
    low, high = w.amin(2).clamp(max=0), w.amax(2).clamp(min=0)
    scale = ((high - low).clamp(min=1e-5) / top).half().float()
    return scale, (-low / scale).round().clamp(0, top)


def plain_linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def clipped(weight, scale, zero, bits, group):
    """Within what the codes can say, as packers do not clamp."""
    s, z = scale.repeat_interleave(group, 1), zero.repeat_interleave(group, 1)
    return ((weight / s).round() + z).clamp(0, 2**bits - 1).sub(z) * s


def write_awq(module, weight, group):
    gemm, _ = load_awq()
    scale, zero = ranges(weight, group, 4, False)
    layer = gemm.WQLinear_GEMM.from_linear(plain_linear(clipped(weight, scale, zero, 4, group)), 4, group, scales=scale.T.contiguous(),
                                           zeros=zero.T.contiguous())
    return {f"{module}.{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales")}


def act_order(weight, group):
    """Groups of columns in a shuffled order, as act order without static groups leaves them."""
    torch.manual_seed(weight.shape[1])
    return torch.randperm(weight.shape[1]).argsort().div(group, rounding_mode="floor").to(torch.int32)


def write_auto_gptq(module, weight, group, bits):
    g_idx = act_order(weight, group)
    sorted_weight = weight[:, torch.argsort(g_idx, stable=True)]
    scale, zero = ranges(sorted_weight, group, bits, True)
    s, z = scale[:, g_idx.long()], zero[:, g_idx.long()]
    values = ((weight / s).round() + z).clamp(0, 2**bits - 1).sub(z) * s
    layer = load_auto_gptq()(bits, group, weight.shape[1], weight.shape[0], False)
    layer.pack(plain_linear(values), scale.clone(), zero.clone(), g_idx)
    return {f"{module}.{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}


def write_gptqmodel(module, weight, group, bits):
    g_idx = act_order(weight, group)
    scale, zero = ranges(weight[:, torch.argsort(g_idx, stable=True)], group, bits, False)
    s, z = scale[:, g_idx.long()], zero[:, g_idx.long()]
    values = ((weight / s).round() + z).clamp(0, 2**bits - 1).sub(z) * s
    linear, _ = load_gptqmodel()
    layer = linear(bits=bits, group_size=group, desc_act=True, sym=False, in_features=weight.shape[1], out_features=weight.shape[0],
                   bias=False, pack_dtype=torch.int32)
    layer.pack_original(plain_linear(values), scale.clone(), zero.clone(), g_idx)
    return {f"{module}.{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}


def write_compressed(module, weight, group, bits, symmetric):
    compressor, arguments, scheme_type = load_compressed()
    scale, zero = ranges(weight, group, bits, symmetric)
    weights = arguments(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=group)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": (zero - 2 ** (bits - 1)).to(torch.int8)}
    made = compressor.compress(state, scheme_type(targets=["Linear"], weights=weights))
    made["weight_scale"] = scale.bfloat16() if symmetric else scale.half()  # bf16, as most of these files have it
    return {f"{module}.{part}": value for part, value in made.items()}


def is_linear(name, value):
    return name.endswith(".weight") and value.dim() == 2 and ".layers." in name and not name.endswith("mlp.gate.weight")


def make_theirs(model, out, quantization, writer):
    out.mkdir()
    tensors = {}
    for name, value in tensors_of(model).items():
        module = name[: -len(".weight")]
        tensors.update(writer(module, value.float()) if is_linear(name, value) else {name: value})
    save_file({name: value.contiguous() for name, value in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, out / name)


def check(name, make, reader, arguments):
    """Makes a directory, reads it with the package and with cachalot."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        try:
            directory = make(scratch)
            config = json.loads((directory / "config.json").read_text())["quantization_config"]
            theirs = reader(tensors_of(directory), config)
        except ImportError as error:
            return skip(name, error)
        except RuntimeError as error:
            return report(name, error, False)
        compare(name, Ours(arguments.cachalot, directory, scratch), theirs)


def check_transformers(arguments):
    """A whole directory through transformers, against its own model with the weights that cachalot reads."""
    name = "transformers loads compressed-tensors"
    if arguments.dense is None:
        return skip(name, "no --dense model")
    try:
        from transformers import AutoModelForCausalLM
        load_compressed()
    except ImportError as error:
        return skip(name, error)
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        run([arguments.cachalot, "quantize", "-m", arguments.dense, "-o", scratch / "ours", "--format", "compressed-tensors", "--type",
             f"int4-g{arguments.group}-sym", "-q"])  # with zero points transformers 5.24 expects them unpacked, unlike its own packer
        ours = Ours(arguments.cachalot, scratch / "ours", scratch)
        plain = AutoModelForCausalLM.from_pretrained(arguments.dense, dtype=torch.float32)
        for module_name, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in module_name:
                module.weight.data = torch.from_numpy(ours.weight(module_name))
        loaded = AutoModelForCausalLM.from_pretrained(scratch / "ours", dtype=torch.float32)
        tokens = torch.arange(5, 37)[None]
        with torch.no_grad():
            difference = float((loaded(tokens).logits - plain(tokens).logits).abs().max())
        report(name, f"largest difference of logits {difference:.2g}", difference < 1e-4)


def check_llama_cpp(arguments):
    try:
        import llama_cpp
    except ImportError as error:
        return skip("llama.cpp loads q4_k_m", error)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.gguf"
        run([arguments.cachalot, "quantize", "-m", arguments.gguf_model or arguments.model, "-o", path, "--type", "q4_k_m", "-q"])
        llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False)
        llama.eval(list(range(5, 37)))
        report("llama.cpp loads q4_k_m", f"finite logits of {llama.n_tokens} tokens", bool(np.isfinite(llama.scores[:32]).all()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cachalot", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a directory of bf16 weights")
    parser.add_argument("--dense", type=pathlib.Path, help="a directory of a small model without experts, not of llama's kind")
    parser.add_argument("--gguf-model", type=pathlib.Path, help="for llama.cpp, which takes DeepSeek-V2 models without q_lora_rank only at"
                        " 26 or 27 layers")
    parser.add_argument("--group", type=int, default=32)
    arguments = parser.parse_args()
    model, group = arguments.model, arguments.group

    def ours(form, kind):
        def make(scratch):
            run([arguments.cachalot, "quantize", "-m", model, "-o", scratch / "ours", "--format", form, "--type", kind, "-q"])
            return scratch / "ours"
        return make

    def theirs(quantization, writer):
        def make(scratch):
            make_theirs(model, scratch / "theirs", quantization, writer)
            return scratch / "theirs"
        return make

    gptq = {"quant_method": "gptq", "group_size": group, "desc_act": True}
    for form, kind, readers in [("awq", f"int4-g{group}-zp", [read_awq]), ("gptq", f"int4-g{group}-sym", [read_auto_gptq, read_gptqmodel]),
                                ("gptq", f"int8-g{group}-sym", [read_auto_gptq, read_gptqmodel]),
                                ("gptq_v2", f"int4-g{group}-zp", [read_gptqmodel]), ("gptq_v2", "int8-row-zp", [read_gptqmodel]),
                                ("compressed-tensors", f"int4-g{group}-sym", [read_compressed]),
                                ("compressed-tensors", f"int4-g{group}-zp", [read_compressed]),
                                ("compressed-tensors", "int8-row-sym", [read_compressed]), ("fp8", "fp8", [read_fp8])]:
        for reader in readers:
            check(f"ours to theirs, {form} {kind}, {reader.__name__[5:]}", ours(form, kind), reader, arguments)
    check("theirs to ours, autoawq",
          theirs({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
                 lambda m, w: write_awq(m, w, group)), read_awq, arguments)
    for bits in (4, 8):
        check(f"theirs to ours, auto-gptq, {bits} bits, act order", theirs({**gptq, "bits": bits, "sym": True},
              lambda m, w, b=bits: write_auto_gptq(m, w, group, b)), read_auto_gptq, arguments)
        check(f"theirs to ours, gptqmodel v2, {bits} bits, act order",
              theirs({**gptq, "bits": bits, "sym": False, "checkpoint_format": "gptq_v2"},
                     lambda m, w, b=bits: write_gptqmodel(m, w, group, b)), read_gptqmodel, arguments)
        for symmetric in (True, False):
            weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
            check(f"theirs to ours, compressed-tensors, {bits} bits, {'symmetric' if symmetric else 'zero points'}",
                  theirs({"quant_method": "compressed-tensors", "format": "pack-quantized",
                          "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}},
                         lambda m, w, b=bits, s=symmetric: write_compressed(m, w, group, b, s)), read_compressed, arguments)
    check_transformers(arguments)
    check_llama_cpp(arguments)
    if FAILED:
        sys.exit(f"{len(FAILED)} failed")


if __name__ == "__main__":
    main()
