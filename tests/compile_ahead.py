"""Compile kernels for an architecture without its GPU, in a process of its own: the tests' has Triton's interpreter."""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels


def compile_ahead(cell):
    """Compile one kernel for an architecture without its GPU; returns what the machine code looks like."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel, D, G, S, arch, *one_row = cell.split()
    D, G, S = int(D), int(G), int(S)
    tile = dict(D=D, G=G, GP=kernels.power_of_2(G), KP=kernels.power_of_2(D // G))
    function, n, constants = {  # the plainest and the fullest form of each kernel
        "score": (kernels.score_kernel, 0, dict(D=D, G=G, BM=64, BK=min(64, tile["KP"]), BU=32, WRITE=True, BELOW=True,
                                                SPLIT=True, UPCAST=False)),
        "mix": (kernels.mix_kernel, S, tile | dict.fromkeys(("CARRY", "FINAL", "ADDED", "FACTOR", "SHARE"), S == 1) |
                dict(NP=32, S=S, STEP=1, PAIRS=1, UNROLL=4 if S == 1 else 1)),
        "own": (kernels.own_kernel, 1, tile | dict(ADDED=True, FACTOR=True)),
        "pull": (kernels.pull_kernel, S + (G > 1), tile | dict(S=S, STEP=1, PAIRS=0, KEYED=False, CARRY_V=S == 1,
                                                               CARRY_K=False, SHARE=False, UNROLL=1)),
        "keyed": (kernels.pull_kernel, 2, tile | dict(S=1, STEP=1, PAIRS=0, KEYED=True, CARRY_V=True, CARRY_K=True,
                                                      SHARE=True, UNROLL=1)),
        "write": (kernels.transport_kernel, 0, dict(OLD=True, B=1024)),
        "unwrite": (kernels.transport_backward_kernel, 0, dict(OLD=True, B=1024))}[kernel]
    fp32 = {"p_raw", "p_rho", "p_lse", "p_scale", "p_factor", "p_share", "p_delta", "p_part", "p_gate", "p_sums"}
    names = function.arg_names
    kind = {n: "constexpr" if n in constants else "*i32" if n == "p_offset" else "*fp32" if n in fp32 else "*bf16"
            if n.startswith("p_") else "fp32" if n == "eps" else "i32" for n in names}
    if one_row and "M" in names:  # Triton compiles an argument that is 1 as a constant
        constants, kind = constants | dict(M=1), kind | dict(M="constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if n.startswith("p_") or (n in ("M", "n") and n not in constants)}
    source = ASTSource(fn=function, signature=kind, attrs=aligned,
                       constexprs={(names.index(n),): v for n, v in constants.items()})
    warps = kernels.n_warps(n, G, D) if n else 4
    built = triton.compile(source, target=GPUTarget("cuda", int(arch), 32), options=dict(num_warps=warps))
    tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"])
        f.flush()
        usage, code = (subprocess.run([tool, flag, f.name], capture_output=True, text=True, check=True).stdout
                       for flag in ("--dump-resource-usage", "--dump-sass"))
    number = {key: int(re.search(key + r":(\d+)", usage)[1]) for key in ("REG", "STACK")}
    return number | dict(warps=warps, spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
                         wide=len(re.findall(r"\bLDG(?:STS)?\.E\.(?:\w+\.)*128", code)),
                         barriers=len(re.findall(r"\bBAR\.", code)), shared=built.metadata.shared)


if __name__ == "__main__":
    print(json.dumps({cell: compile_ahead(cell) for cell in sys.argv[1:]}))
