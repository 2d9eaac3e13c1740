import sys, json, torch, statistics, functools
from benchmarks.loops import tilings as T
from gatewise.contract.device import Device
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.launches.builds import building, launches_of
from gatewise.benchmarks.precision import PRECISIONS
plain=Tiling.macros; EXTRA={}
def macros(self,*a,**k):
    m=plain(self,*a,**k)
    if self.warpgroups or self.stacked: return m
    if EXTRA.get('ROTATED'): m['ROTATED']=1
    if EXTRA.get('PAIRED') and self.spans%2==0 and not self.one_row:
        m['PAIRED']=1
        n=self.chunk*self.ahead
        m['CHUNK']=2; m['DEPTH']=max(1,n//2)
    return m
Tiling.macros=macros
VARIANTS=({}, {'ROTATED':1}, {'PAIRED':1}, {'ROTATED':1,'PAIRED':1})
CASES={'bf16':('35-20-1500','70-80-1150','100-64-1024','50-256-1024','100-64-2048','50-256-512','50-128-512','100-64-512','35-20-650','35-128-1500','100-16-1024','200-8-512'),
 'tf32':('35-20-1500','70-80-1150','100-64-1024','50-128-512','50-256-512')}
def results(problem, dev):
    from gatewise.nn import LSTM
    torch.manual_seed(0)
    layer=LSTM(problem.input_size,problem.hidden_size,device=dev,dtype=problem.dtype,kernel='persistent')
    x=torch.randn(problem.time,problem.batch,problem.input_size,device=dev,dtype=problem.dtype).requires_grad_()
    y,(h,c)=layer(x)
    return [y,h,c,*torch.autograd.grad(y,[x,*layer.parameters()],torch.randn_like(y))]
def clear():
    for f in (compiled.launch_of,):
        f.cache_clear()
    for name in dir(compiled):
        o=getattr(compiled,name)
        if hasattr(o,'cache_clear'): o.cache_clear()
if __name__=='__main__':
    dev=torch.device('cuda',0); probed=Device.probe(dev)
    for dt,cases in CASES.items():
        pr=PRECISIONS[dt]
        with pr.applied():
            needed=[]
            for v in VARIANTS:
                EXTRA.clear(); EXTRA.update(v); clear()
                for c in cases:
                    L=launches_of(T.problem_of(c,pr),probed)
                    needed+=[(dict(v),l) for l in L]
            # compile in threads, each with its own macros: macros are read at compile time, so set per variant in turn
            import concurrent.futures as cf
            for v in VARIANTS:
                EXTRA.clear(); EXTRA.update(v)
                mine=[l for w,l in needed if w==v]
                with cf.ThreadPoolExecutor(15) as ex: list(ex.map(lambda l:l.compile(),mine))
            for c in cases:
                ref=None
                for v in VARIANTS+({},):
                    EXTRA.clear(); EXTRA.update(v); clear()
                    try: t=T.loops_of(T.problem_of(c,pr),dev)
                    except Exception as e: print(c,v,'failed',repr(e)[:200],flush=True); continue
                    steps=int(c.split('-')[0])
                    got=results(T.problem_of(c,pr),dev); ref=ref or got
                    same=all(torch.equal(a,b) for a,b in zip(ref,got))
                    print(json.dumps({'same':same,'case':c,'dtype':dt,'v':v,**{k.replace('recurrent_',''):round(x/steps,3) for k,x in t.items()}}),flush=True)
