import sys, json, statistics, importlib.util, tempfile, time
from pathlib import Path
sys.path.insert(0,'benchmarks')
import dense
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.triton import gemv
from gemmtuned.kernels.triton.shortlist import MODULES
V={"noevict":[(', eviction_policy="evict_first"','')],
   "xlast":[("xt = tl.load(x + k)",'xt = tl.load(x + k, eviction_policy="evict_last")'),("xt = tl.load(x + k, mask=k < K, other=0.0)",'xt = tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last")')],
   "cg":[(', eviction_policy="evict_first"',', cache_modifier=".cg"')],
   "xfirst":[('''            wt = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
            xt = tl.load(x + k)
''','''            xt = tl.load(x + k)
            wt = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
''')]}
folder=Path(tempfile.mkdtemp())
src=Path(gemv.__file__).read_text()
for what,rs in V.items():
    name="gemv_"+what; text=src.replace('NAME: Final = "gemv"',f'NAME: Final = "{name}"')
    for a,b in rs:
        assert a in text,(what,a); text=text.replace(a,b)
    p=folder/(name+".py"); p.write_text(text); spec=importlib.util.spec_from_file_location(name,p); m=importlib.util.module_from_spec(spec); sys.modules[name]=m; spec.loader.exec_module(m); MODULES[name]=m
import math
logs={v:[] for v in V}
for r in json.load(open('benchmarks/results/dense-m1-m4-h200-2026-11-22.json'))['rows']:
    if r['m']!=1: continue
    p=Problem(m=1,n=r['n'],k=r['k'],dtype="bf16",math_mode="reduced"); c=json.loads(r['config'])
    cs=[Candidate.of("triton",**c)]+[Candidate.of("triton",**{**c,"kernel":"gemv_"+v}) for v in V]
    t=[statistics.median(x) for x in dense.take_turns(p,cs,floor=True)]
    for v,x in zip(V,t[1:]): logs[v].append(math.log(t[0]/x))
    print(r['n'],r['k'],[round(x,3) for x in t[:len(cs)]],'floor',round(min(t[len(cs):]),3),flush=True)
print({v:math.exp(sum(l)/len(l)) for v,l in logs.items()})
