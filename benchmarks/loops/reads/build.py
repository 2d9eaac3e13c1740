import itertools, json, hashlib
from pathlib import Path
from gatewise.kernels.cuda.toolchain import compile_afresh
here=Path(__file__).parent
V=[]
def add(**m): V.append(m)
for layout in (0,1,3):
    for fl in (4,6,10): add(LAYOUT=layout,FLIGHT=fl)
    add(LAYOUT=layout,FLIGHT=6,ROTATE=1)
    add(LAYOUT=layout,FLIGHT=6,COPIES=4)
    for fl in (3,5): add(LAYOUT=layout,FLIGHT=fl,WARPS=16)
    add(LAYOUT=layout,FLIGHT=8,ROWS=8); add(LAYOUT=layout,FLIGHT=8,ROWS=16)
for layout in (0,3):
    for st in (3136,12288,12032): add(LAYOUT=layout,FLIGHT=6,STRIDE=st)
for p in (2048,3072,6144): add(MODE=1,LAYOUT=1,PIECE=p)
lines=[]
for m in V:
    name=hashlib.md5(json.dumps(m,sort_keys=True).encode()).hexdigest()[:10]
    b,res=compile_afresh(here/'reads.cu','sm_90a',m)
    if res.spilled_bytes: print(m,res)
    (here/f'{name}.cubin').write_bytes(b)
    lines.append({'name':name,'macros':m,'registers':res.registers})
(here/'variants.json').write_text(json.dumps(lines))
print(len(lines))
