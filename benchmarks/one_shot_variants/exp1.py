import ctypes, json, math, os, statistics, sys, time, glob
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
sys.path[:0]=["benchmarks","benchmarks/one_shot_variants"]
import torch, dense, nv
from screen import winners
from timing import CudaTimer, floor_launches
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.measure import Bench
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.switches import as_called
from torch.cuda._utils import _cuda_load_module
M=64
TILES={(576,7168):[(40,7),(40,8),(48,8),(40,6)],(2112,7168):[(56,3),(64,3),(96,5),(72,4),(80,4)],(1280,8192):[(56,4),(48,4),(64,5),(80,6),(64,6)],(256,7168):[(40,16),(24,8),(40,14),(16,6),(40,12),(24,7)],
 (7168,2048):[(56,1),(64,1),(112,2)],(4096,4096):[(64,2),(32,1),(72,2)],(1536,7168):[(96,6),(56,4),(64,4),(48,3),(72,5)],(512,16384):[(88,15),(88,16),(88,14),(80,14),(40,8)]}
V4=Path("benchmarks/one_shot_variants/v4.cu").read_text()
VAR={"v4":dict(src=V4), "unroll":dict(roll=0),"roll":dict(),"two":dict(two=1),"b2":dict(before=2),"b4two":dict(before=4,two=1)}
OLD=Path("benchmarks/one_shot.cu").read_text()
def old(n,k,rows,parts,d):
    v=dict(N=n,K=k,ROWS=rows,PARTS=parts,DEPTH=d,LOADERS=0,READ_X=1); nr=rows//2
    regs=", ".join(f"%{i}" for i in range(nr)); vals=", ".join(f'"+f"(sums[{i}])' for i in range(nr))
    mma=(f'__device__ __forceinline__ void mma(float* sums, u64 a, u64 b) {{\n  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{regs}}}, %{nr}, %{nr+1}, 1, 1, 1, 0, 0;"\n : {vals} : "l"(a), "l"(b));\n}}\n')
    t="".join(f"#define {a} {b}\n" for a,b in v.items())+OLD.replace("\nMMA\n","\n"+mma+"\n").replace("#include <cuda_bf16.h>","struct bf2 { unsigned int v; };\n__device__ __forceinline__ bf2 pk(float a, float b) { bf2 r; asm(\"cvt.rn.bf16x2.f32 %0, %1, %2;\" : \"=r\"(r.v) : \"f\"(b), \"f\"(a)); return r; }\nstruct bf1 { unsigned short v; };").replace("__nv_bfloat162","bf2").replace("__nv_bfloat16","bf1").replace("__floats2bfloat162_rn","pk")
    return t.replace("__launch_bounds__", (f"__cluster_dims__({parts}, 1, 1) " if parts>1 else "")+"__launch_bounds__")
def depth(rows,parts,k):
    most=-(-(k//64)//parts); each=2*-(-(rows//2)//parts)
    s=lambda d: d*(rows+64)*128+(parts*each*256 if parts>1 else 0)+16+8*d
    d=max(d for d in range(1,most+1) if s(d)<=226<<10); return d, s(d)
def build(n,k,rows,parts,var):
    v=dict(VAR[var]); r=v.pop("_r",None); ex=v.pop("_ex",0)
    d,sh=depth(rows,parts,k); most=-(-(k//64)//parts)

    src=old(n,k,rows,parts,d) if var=='old' else nv.source(n,k,rows,parts,d,**v)
    if r: assert r[0] in src,r; src=src.replace(*r)
    if ex: src=src.replace('st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"\n                     ::"r"(to)','st.shared.v2.f32 [%0], {%1, %2}; mov.u32 r_dummy, %3;"\n ::"r"(slots+lane*8)') if 0 else src.replace('int units = min(max(LIVE - part * EACH, 0), EACH);','int units = 0;').replace('if (warp < TOKENS / 16) {','if (warp < (m == 12345 ? TOKENS / 16 : 0)) {')
    c,log=nv.compile(src); assert "0 bytes spill stores" in log, log
    return c,sh
jobs=[(n,k,r,p,v) for (n,k),ts in TILES.items() for i,(r,p) in enumerate(ts) for v in VAR if not (v=="noexch" and p==1)]
if __name__=="__main__":
    t=time.time()
    with ThreadPoolExecutor(12) as ex: built=dict(zip(jobs,ex.map(lambda j:build(*j),jobs)))
    print("compiled",len(jobs),round(time.time()-t,1),flush=True)
    if not torch.cuda.is_available(): sys.exit()
    torch.zeros(1,device="cuda")
    won=winners([Path("benchmarks/results/dense-m1-m64-h200-2026-11-23.json")], torch.cuda.get_device_name())
    cu=ctypes.CDLL("libcuda.so.1"); out=[]; timer=CudaTimer()
    for (n,k) in TILES:
        problem=Problem(m=M,n=n,k=k,dtype="bf16",math_mode="reduced"); runs=[];arms=[]
        with torch.inference_mode(), as_called(problem):
            bench=Bench(problem,torch.device("cuda")); weights=[b.t() for b in bench.weights]
            L=len(weights)*math.ceil(30/len(weights))
            for name,cand in (("torch",dense.DEFAULT),("before",won[M,n,k])):
                calls=bench.arm(name,BACKENDS[cand.backend].prepare(cand,problem),problem).calls
                runs.append(timer.prepare(lambda i,calls=calls: calls[i%len(calls)](),L)); arms.append((name,"",""))
            x=torch.randn(M,k,device="cuda").bfloat16(); exact=x.double()@weights[0].double().T
            for job,(cubin,sh) in built.items():
                if job[:2]!=(n,k): continue
                rows,parts,var=job[2:]
                f=_cuda_load_module(cubin,["one_shot"])["one_shot"]
                if parts>8: assert cu.cuFuncSetAttribute(f.func,14,1)==0
                f.set_shared_memory_config(sh)
                y=torch.full((M,n),math.nan,device="cuda").bfloat16()
                def call(i,f=f,y=y,rows=rows,parts=parts,sh=sh):
                    w=weights[i%len(weights)]
                    f(grid=(-(-n//rows)*parts,1,1),block=(128,1,1),args=[x,w,y,M,x.stride(0),w.stride(0)],shared_mem=sh)
                call(0); torch.cuda.synchronize()
                e=float((y.double()-exact).norm()/exact.norm())
                if not var.startswith("no") and not e<4e-3: print("WRONG",job,e); continue
                runs.append(timer.prepare(call,L)); arms.append((f"{rows}x{parts}",var,round(e,5)))
            times=timer.measure([*runs,*floor_launches(timer,weights,L)],10)
        us=[statistics.median(s[2:])/L for s in times]; floor=min(us[len(arms):])
        print(n,k,"floor",round(floor,3)," ".join(f"{a[0]} {u/floor:.3f}" for a,u in zip(arms[:2],us)))
        tab={}
        for a,u in zip(arms[2:],us[2:]): tab.setdefault(a[0],{})[a[1]]=round(u/floor,3)
        for tile,vs in tab.items(): print("   ",tile,vs)
        sys.stdout.flush(); out.append(dict(n=n,k=k,floor=floor,tab=tab,before=us[1]/floor,torch=us[0]/floor))
    for v in VAR: print(v, round(math.exp(sum(math.log(min(t.get(v,9) for t in o["tab"].values()) if v!="noexch" or o["n"]!=7168 else 1.15) for o in out)/len(out)),4))
    Path(os.environ["OUT"],"exp1.json").write_text(json.dumps(out))
