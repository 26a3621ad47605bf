import ctypes, glob, sys, time, re
from pathlib import Path
def lib():
    import importlib.util
    for p in sys.path:
        for f in glob.glob(f"{p}/nvidia/cu13/lib/libnvrtc.so.*")+glob.glob(f"{p}/nvidia/cuda_nvrtc/lib/libnvrtc.so.*"):
            ctypes.CDLL(glob.glob(str(Path(f).parent/'libnvrtc-builtins.so.*'))[0])
            return ctypes.CDLL(f)
L=lib()
def compile(src, arch="sm_90a", opts=()):
    prog=ctypes.c_void_p()
    assert L.nvrtcCreateProgram(ctypes.byref(prog), src.encode(), b"one_shot.cu",0,None,None)==0
    o=[f"--gpu-architecture={arch}","--std=c++17","--ptxas-options=-v","--no-cache",*opts]
    arr=(ctypes.c_char_p*len(o))(*[x.encode() for x in o])
    rc=L.nvrtcCompileProgram(prog,len(o),arr)
    n=ctypes.c_size_t(); L.nvrtcGetProgramLogSize(prog,ctypes.byref(n)); b=ctypes.create_string_buffer(n.value); L.nvrtcGetProgramLog(prog,b)
    log=b.value.decode()
    if rc: raise RuntimeError(log)
    L.nvrtcGetCUBINSize(prog,ctypes.byref(n)); b=ctypes.create_string_buffer(n.value); L.nvrtcGetCUBIN(prog,b)
    return b.raw, log
SRC=Path("kernels/cuda/one_shot.cu").read_text()
def source(n,k,rows,parts,depth,tokens=64,bias=0,half=0,early=1,behind=2,fence=0,exch=1,roll=1,wait=1,before=1,onefence=0,two=0,src=SRC):
    t="f16" if half else "bf16"
    nr=rows//2
    regs=", ".join(f"%{i}" for i in range(nr)); vals=", ".join(f'"+f"(sums[{i}])' for i in range(nr))
    mma=(f'__device__ __forceinline__ void mma(float* sums, u64 a, u64 b) {{\n  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{t}.{t} {{{regs}}}, %{nr}, %{nr+1}, 1, 1, 1, 0, 0;"\n : {vals} : "l"(a), "l"(b));\n}}\n'
     f'__device__ __forceinline__ u32 pair_of(float first, float second) {{ u32 both; asm("cvt.rn.{t}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first)); return both; }}\n'
     + ('__device__ __forceinline__ float value(unsigned short h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }' if half else '__device__ __forceinline__ float value(unsigned short h) { return __uint_as_float((u32)h << 16); }'))
    d=dict(N=n,K=k,ROWS=rows,PARTS=parts,DEPTH=depth,TOKENS=tokens,BIAS=bias,EARLY=early,BEHIND=behind,FENCE=fence,EXCH=exch,ROLL=roll,WAIT=wait,BEFORE=before,ONEFENCE=onefence,TWO=two)
    d["CLUSTER"]=f"__cluster_dims__({parts}, 1, 1)" if parts>1 else ""
    return "".join(f"#define {a} {b}\n" for a,b in d.items())+src.replace("\nMMA\n","\n"+mma+"\n")
