import ctypes, json, math, os, statistics, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
sys.path[:0]=["benchmarks","benchmarks/one_shot_variants"]
os.environ["GEMMTUNED_CACHE"]="/tmp/gtcache"
import torch, dense
from timing import CudaTimer, floor_launches
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.measure import Bench
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.switches import as_called
from gemmtuned.kernels.cuda import one_shot, nvrtc
from gemmtuned.kernels.cuda.driver import Kernel
M=64
TILES={(576,7168):[(40,7),(40,8),(48,8)],(2112,7168):[(56,3),(96,5),(72,4),(104,5)],(1280,8192):[(88,6),(56,4),(64,5),(80,6)],(256,7168):[(40,16),(40,14),(40,13),(40,12),(24,8)],
 (7168,2048):[(56,1),(64,1)],(4096,4096):[(64,2),(32,1),(72,2)],(1536,7168):[(96,6),(56,4),(64,4)],(512,16384):[(88,15),(88,16),(88,14),(40,8)]}
T={k:Path(p).read_text() for k,p in {"p0":"benchmarks/one_shot_variants/p0.cu","new":"kernels/cuda/one_shot.cu","own":"benchmarks/one_shot_variants/own.cu"}.items()}
exec(Path("benchmarks/one_shot_variants/vars.py").read_text())
def build(n,k,rows,parts,var):
    text,defs,reps=VARS[var]
    one=one_shot.OneShot(M,n,k,False,"bf16",rows,parts)
    src=one.source()
    base=one_shot._text()
    head=src[:src.index("// Y = X W^T")]
    body=text.replace("\nOF_THIS_TYPE\n", f"\n{one_shot._of_type('bf16', rows)}\n")
    for a,b in reps: assert a in body,(var,a); body=body.replace(a,b)
    src="".join(f"#define {a} {b}\n" for a,b in defs.items())+head+body
    c=nvrtc.compiled(src,"sm_90a"); assert c.spill_bytes==0
    return c.data,one
jobs=[(n,k,r,p,v) for (n,k),ts in TILES.items() for r,p in ts for v in VARS]
t=time.time()
with ThreadPoolExecutor(12) as ex: built=dict(zip(jobs,ex.map(lambda j:build(*j),jobs)))
print("compiled",len(jobs),round(time.time()-t,1),flush=True)
if not torch.cuda.is_available(): sys.exit()
torch.zeros(1,device="cuda"); out=[]; timer=CudaTimer()
for (n,k) in TILES:
    problem=Problem(m=M,n=n,k=k,dtype="bf16",math_mode="reduced"); runs=[];arms=[]
    with torch.inference_mode(), as_called(problem):
        bench=Bench(problem,torch.device("cuda")); weights=[b.t() for b in bench.weights]
        L=len(weights)*math.ceil(30/len(weights))
        x=torch.randn(M,k,device="cuda").bfloat16(); exact=x.double()@weights[0].double().T
        for job,(data,one) in built.items():
            if job[:2]!=(n,k): continue
            rows,parts,var=job[2:]
            f=Kernel(data,"one_shot",grid=one.programs,threads=128,shared=one.shared,cluster=parts)
            y=torch.full((M,n),math.nan,device="cuda").bfloat16()
            def call(i,f=f,y=y):
                w=weights[i%len(weights)]
                f(torch.cuda.current_stream().cuda_stream,[x.data_ptr(),w.data_ptr(),y.data_ptr()],(M,x.stride(0),w.stride(0)))
            call(0); torch.cuda.synchronize()
            e=float((y.double()-exact).norm()/exact.norm())
            if not var.startswith("no") and not e<4e-3: print("WRONG",job,e); continue
            runs.append(timer.prepare(call,L)); arms.append((f"{rows}x{parts}",var))
        times=timer.measure([*runs,*floor_launches(timer,weights,L)],14)
    us=[statistics.median(s[2:])/L for s in times]; floor=min(us[len(arms):])
    print(n,k,"floor",round(floor,3))
    tab={}
    for a,u in zip(arms,us): tab.setdefault(a[0],{})[a[1]]=round(u/floor,3)
    for tile,vs in tab.items(): print("   ",tile,vs)
    sys.stdout.flush(); out.append(dict(n=n,k=k,floor=floor,tab=tab))
for v in VARS: print(v, round(math.exp(sum(math.log(min(t.get(v,9) for t in o["tab"].values())) for o in out)/len(out)),4), "all tiles", round(math.exp(statistics.mean(math.log(t[v]/t["own"]) for o in out for t in o["tab"].values() if v in t)),4))
Path(os.environ["OUT"],"exp2.json").write_text(json.dumps(out))
