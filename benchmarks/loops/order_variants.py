import sys, json, torch, statistics
sys.path.insert(0,'.')
from benchmarks.loops import tilings as T
from gatewise.contract.device import Device
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.launches.builds import launches_of
from gatewise.benchmarks.precision import PRECISIONS
import concurrent.futures as cf
plain=Tiling.macros; EXTRA={}
def macros(self,*a,**k):
    m=plain(self,*a,**k)
    if self.warpgroups or self.stacked or self.distributed: return m
    m.update({k:v for k,v in EXTRA.items() if k!='PAUSE' and not (k=='FPAUSE' and self.backward)})
    return m
Tiling.macros=macros
p0=compiled._pause
compiled._pause=lambda cut,device: EXTRA.get('PAUSE',p0(cut,device))
from gatewise.kernels.persistent import buffers
from gatewise.kernels.persistent.schedules import single_layer as sl
from gatewise.kernels.persistent.sizes.padding import hidden_of
ex0=buffers.exchanged
def ex(problem, layer, y, masks, entered, tokens, scratch):
    pad=EXTRA.get('XPAD',0)
    if not pad: return ex0(problem, layer, y, masks, entered, tokens, scratch)
    return tokens.new(scratch, width=hidden_of(problem.hidden_size)+pad), y, layer.h0
buffers.exchanged=ex
ng0=sl._new_gate_gradients
def ng(tokens, directions, width, counters, scratch, like):
    pad=EXTRA.get('XPAD',0)
    a,b=ng0(tokens, directions, width+pad, counters, scratch, like)
    return a[...,:width],b
sl._new_gate_gradients=ng
VARIANTS=[{},{'SELECTIVE':1},{'SELECTIVE':1,'PAUSE':0,'FPAUSE':150},{'SELECTIVE':1,'PAUSE':200,'FPAUSE':300},{'ORDERED':2},{'ORDERED':2,'SELECTIVE':1},{'ORDERED':2,'SELECTIVE':1,'FPAUSE':150,'PAUSE':200}]
CASES=('100-16-1024','200-8-1024','100-64-1024','200-8-512','200-32-512','100-64-512','50-128-512','200-16-768','35-24-1504','35-24-640','70-80-1152','100-16-896','100-64-2048','50-256-1024')
OLD=('35-24-1504','35-24-640','70-80-1152','200-32-512','100-64-512','50-128-512','50-256-512','200-8-512','100-16-1024','100-64-1024','50-256-1024','200-8-1024','200-16-768','100-64-2048','35-128-1504')
def clear():
    for name in dir(compiled):
        o=getattr(compiled,name)
        if hasattr(o,'cache_clear'): o.cache_clear()
cuda=torch.cuda.is_available()
probed=Device.probe(torch.device('cuda',0)) if cuda else Device.named('h200')
pr=PRECISIONS['bf16']
cases = sys.argv[1:] or CASES
with pr.applied():
    for v in VARIANTS:
        EXTRA.clear(); EXTRA.update(v); clear()
        L=[l for c in cases for l in launches_of(T.problem_of(c,pr),probed)]
        with cf.ThreadPoolExecutor(15 if cuda else 2) as ex: b=list(ex.map(lambda l:l.compile(),L))
        print(v,'compiled',flush=True)
    if cuda:
        for c in cases:
            for v in VARIANTS+[{}]:
                EXTRA.clear(); EXTRA.update(v); clear()
                try: t=T.loops_of([T.training_step(T.problem_of(c,pr),torch.device('cuda',0))])[0]
                except Exception as e: print(c,v,'failed',repr(e)[:300],flush=True); continue
                n=int(c.split('-')[0])
                print(json.dumps({'case':c,'v':v,**{k.replace('recurrent_',''):round(x/n,3) for k,x in t.items()}}),flush=True)
