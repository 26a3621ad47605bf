BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'gemmtuned','0001_initial','2026-11-25 01:58:08.145938+00:00');
INSERT INTO "_sqlite_migrations" VALUES(2,'gemmtuned','0002_views','2026-11-25 01:58:08.147927+00:00');
INSERT INTO "_sqlite_migrations" VALUES(3,'gemmtuned','0003_launch','2026-11-25 01:58:08.149054+00:00');
INSERT INTO "_sqlite_migrations" VALUES(4,'gemmtuned','0004_compiled','2026-11-25 01:58:08.149420+00:00');
INSERT INTO "_sqlite_migrations" VALUES(5,'gemmtuned','0005_rank','2026-11-25 01:58:08.150549+00:00');
INSERT INTO "_sqlite_migrations" VALUES(6,'gemmtuned','0006_recheck','2026-11-25 01:58:08.152556+00:00');
INSERT INTO "_sqlite_migrations" VALUES(7,'gemmtuned','0007_asked','2026-11-25 01:58:08.152849+00:00');
INSERT INTO "_sqlite_migrations" VALUES(8,'gemmtuned','0008_hint','2026-11-25 01:58:08.153265+00:00');
INSERT INTO "_sqlite_migrations" VALUES(9,'gemmtuned','0009_ingest','2026-11-25 01:58:08.153494+00:00');
INSERT INTO "_sqlite_migrations" VALUES(10,'gemmtuned','0010_frozen','2026-11-25 01:58:08.153815+00:00');
INSERT INTO "_sqlite_migrations" VALUES(11,'gemmtuned','0011_namespace','2026-11-25 01:58:08.155210+00:00');
INSERT INTO "_sqlite_migrations" VALUES(12,'gemmtuned','0012_others','2026-11-25 01:58:08.157064+00:00');
CREATE TABLE compiled_gemm (
    problem_id INTEGER NOT NULL REFERENCES problem,         -- math_mode and deterministic are not known there
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    kernel TEXT NOT NULL CHECK (length(kernel) <= 200),     -- what kind of template Inductor chose
    first_seen_us INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (problem_id, environment_id, run_id, kernel)
) STRICT, WITHOUT ROWID;
CREATE TABLE demand (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    calls INTEGER NOT NULL CHECK (calls >= 0),
    sampled_calls INTEGER NOT NULL CHECK (sampled_calls >= 0),
    sampled_us REAL NOT NULL,
    first_seen_us INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (environment_id, problem_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "demand" VALUES(1,1,5700,0,0.0,1794892000000000,1794928000000000);
INSERT INTO "demand" VALUES(2,1,300,0,0.0,1794892000000000,1794892000000000);
INSERT INTO "demand" VALUES(3,1,100,0,0.0,1794892000000000,1794892000000000);
INSERT INTO "demand" VALUES(1,2,9080,0,0.0,1794956800000000,1794992800000000);
INSERT INTO "demand" VALUES(2,2,830,0,0.0,1794956800000000,1794971200000000);
INSERT INTO "demand" VALUES(3,2,60,0,0.0,1794956800000000,1794956800000000);
INSERT INTO "demand" VALUES(4,2,111,0,0.0,1794956800000000,1794971200000000);
INSERT INTO "demand" VALUES(5,2,500,0,0.0,1794956800000000,1794956800000000);
INSERT INTO "demand" VALUES(6,2,44,0,0.0,1794956800000000,1794992800000000);
INSERT INTO "demand" VALUES(7,2,7,0,0.0,1794956800000000,1794956800000000);
INSERT INTO "demand" VALUES(8,3,5050,10,400.0,1794956800000000,1794978400000000);
INSERT INTO "demand" VALUES(9,3,620,0,0.0,1794956800000000,1794978400000000);
INSERT INTO "demand" VALUES(10,3,10,0,0.0,1794956800000000,1794956800000000);
INSERT INTO "demand" VALUES(11,3,5,0,0.0,1794956800000000,1794956800000000);
INSERT INTO "demand" VALUES(12,3,75,0,0.0,1794956800000000,1794978400000000);
INSERT INTO "demand" VALUES(13,3,5,0,0.0,1794956800000000,1794956800000000);
INSERT INTO "demand" VALUES(14,3,5,0,0.0,1794956800000000,1794956800000000);
CREATE TABLE device (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE CHECK (length(key) <= 512),
    kind TEXT NOT NULL,                                     -- cpu, cuda, rocm
    name TEXT NOT NULL,
    arch TEXT NOT NULL,
    units INTEGER NOT NULL
) STRICT;
INSERT INTO "device" VALUES(1,'cuda-nvidia-h200-132','cuda','NVIDIA H200','sm_90',132);
INSERT INTO "device" VALUES(2,'cpu-test-0','cpu','Test CPU','x86_64',8);
CREATE TABLE environment (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE CHECK (length(key) <= 8192),   -- Environment.key
    device_id INTEGER NOT NULL REFERENCES device,
    first_seen_us INTEGER NOT NULL
) STRICT;
INSERT INTO "environment" VALUES(1,'cuda-nvidia-h200-132 cublaslt=130100/sm_90 cuda=13.0/sm_90/6813ed7ea8aa torch=2.13.0 torch_mv=2.13.0 torch_swap=2.13.0 triton=3.6.0/sm_90/aaaaaaaaaaaa',1,1794892000000000);
INSERT INTO "environment" VALUES(2,'cuda-nvidia-h200-132 cublaslt=130100/sm_90 cuda=13.0/sm_90/6813ed7ea8aa torch=2.13.0 torch_mv=2.13.0 torch_swap=2.13.0 triton=3.6.0/sm_90/f64e03e6295b',1,1794956800000000);
INSERT INTO "environment" VALUES(3,'cpu-test-0 onednn=2.13.0/cpu-test-0 onednn_packed=2.13.0/cpu-test-0 torch=2.13.0 torch_mv=2.13.0 torch_swap=2.13.0',2,1794956800000000);
CREATE TABLE environment_stamp (
    environment_id INTEGER NOT NULL REFERENCES environment,
    backend TEXT NOT NULL,
    stamp TEXT NOT NULL,
    PRIMARY KEY (environment_id, backend)
) STRICT, WITHOUT ROWID;
INSERT INTO "environment_stamp" VALUES(1,'cublaslt','130100/sm_90');
INSERT INTO "environment_stamp" VALUES(1,'cuda','13.0/sm_90/6813ed7ea8aa');
INSERT INTO "environment_stamp" VALUES(1,'torch','2.13.0');
INSERT INTO "environment_stamp" VALUES(1,'torch_mv','2.13.0');
INSERT INTO "environment_stamp" VALUES(1,'torch_swap','2.13.0');
INSERT INTO "environment_stamp" VALUES(1,'triton','3.6.0/sm_90/aaaaaaaaaaaa');
INSERT INTO "environment_stamp" VALUES(2,'cublaslt','130100/sm_90');
INSERT INTO "environment_stamp" VALUES(2,'cuda','13.0/sm_90/6813ed7ea8aa');
INSERT INTO "environment_stamp" VALUES(2,'torch','2.13.0');
INSERT INTO "environment_stamp" VALUES(2,'torch_mv','2.13.0');
INSERT INTO "environment_stamp" VALUES(2,'torch_swap','2.13.0');
INSERT INTO "environment_stamp" VALUES(2,'triton','3.6.0/sm_90/f64e03e6295b');
INSERT INTO "environment_stamp" VALUES(3,'onednn','2.13.0/cpu-test-0');
INSERT INTO "environment_stamp" VALUES(3,'onednn_packed','2.13.0/cpu-test-0');
INSERT INTO "environment_stamp" VALUES(3,'torch','2.13.0');
INSERT INTO "environment_stamp" VALUES(3,'torch_mv','2.13.0');
INSERT INTO "environment_stamp" VALUES(3,'torch_swap','2.13.0');
CREATE TABLE hint (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER REFERENCES problem,                  -- its plain case (threads 0, ieee); NULL: we have no words for it
    format TEXT NOT NULL CHECK (length(format) <= 40),      -- aiter-csv, triton-json, tunableop ...
    family TEXT NOT NULL CHECK (length(family) <= 200),     -- in the file's own words
    kind TEXT NOT NULL CHECK (kind IN ('tuned', 'untuned')),
    backend TEXT NOT NULL CHECK (length(backend) <= 200),   -- '' where the row names none; may be one we do not have
    config TEXT NOT NULL CHECK (length(config) <= 4096),
    arch TEXT NOT NULL CHECK (length(arch) <= 200),         -- where it was tuned, '' when the row does not tell
    units INTEGER NOT NULL,                                 -- SMs or CUs, 0 when it does not tell
    us REAL CHECK (us > 0),                                 -- there, by its author's clock; NULL: no valid time
    source TEXT NOT NULL CHECK (length(source) <= 4096),    -- the file; importing it again replaces its rows
    line INTEGER NOT NULL,
    text TEXT NOT NULL CHECK (length(text) <= 65536),       -- the whole row, as JSON
    imported_us INTEGER NOT NULL,
    UNIQUE (source, line)
) STRICT;
INSERT INTO "hint" VALUES(1,16,'aiter-csv','bf16','tuned','cublaslt','{"tile":7}','gfx942',304,9.0,'a.csv',2,'{}',1794996400000000);
CREATE TABLE problem (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL CHECK (length(text) <= 512),         -- str(Problem), for people
    rest TEXT NOT NULL CHECK (length(rest) <= 512),         -- all columns but m: equal for problems that differ in M alone
    family TEXT NOT NULL,
    batch INTEGER NOT NULL CHECK (batch BETWEEN 1 AND 2147483647),
    m INTEGER NOT NULL CHECK (m BETWEEN 1 AND 2147483647),
    n INTEGER NOT NULL CHECK (n BETWEEN 1 AND 2147483647),
    k INTEGER NOT NULL CHECK (k BETWEEN 1 AND 2147483647),
    bias INTEGER NOT NULL CHECK (bias IN (0, 1)),
    dtype TEXT NOT NULL,
    wdtype TEXT NOT NULL,
    out_dtype TEXT NOT NULL,
    scale TEXT NOT NULL,
    layout TEXT NOT NULL,
    weight_state TEXT NOT NULL,
    math_mode TEXT NOT NULL,
    deterministic INTEGER NOT NULL CHECK (deterministic IN (0, 1)),
    threads INTEGER NOT NULL,
    experts INTEGER,
    topk INTEGER,
    "inter" INTEGER,
    act TEXT,
    m_fine INTEGER NOT NULL,                                -- AITER's padded M, level 0
    m_coarse INTEGER NOT NULL,                              -- and level 1
    flops REAL NOT NULL,                                    -- REAL: four dimensions of 2^31 leave int64
    bytes REAL NOT NULL,
    UNIQUE (rest, m)
) STRICT;
INSERT INTO "problem" VALUES(1,'bf16:1x2112x7168,math=reduced','dense|1|2112|7168|False|bf16|bf16|bf16|none|nt|plain|reduced|False|0||||','dense',1,1,2112,7168,0,'bf16','bf16','bf16','none','nt','plain','reduced',0,0,NULL,NULL,NULL,NULL,16,1,30277632.0,30296192.0);
INSERT INTO "problem" VALUES(2,'bf16:4x2112x7168,math=reduced','dense|1|2112|7168|False|bf16|bf16|bf16|none|nt|plain|reduced|False|0||||','dense',1,4,2112,7168,0,'bf16','bf16','bf16','none','nt','plain','reduced',0,0,NULL,NULL,NULL,NULL,16,4,121110528.0,30351872.0);
INSERT INTO "problem" VALUES(3,'bf16:8x4096x7168,math=reduced','dense|1|4096|7168|False|bf16|bf16|bf16|none|nt|plain|reduced|False|0||||','dense',1,8,4096,7168,0,'bf16','bf16','bf16','none','nt','plain','reduced',0,0,NULL,NULL,NULL,NULL,16,8,469762048.0,58900480.0);
INSERT INTO "problem" VALUES(4,'bf16:64x4096x7168,math=reduced','dense|1|4096|7168|False|bf16|bf16|bf16|none|nt|plain|reduced|False|0||||','dense',1,64,4096,7168,0,'bf16','bf16','bf16','none','nt','plain','reduced',0,0,NULL,NULL,NULL,NULL,64,64,3758096384.0,60162048.0);
INSERT INTO "problem" VALUES(5,'dense_add:bf16:8x1024x1024,math=reduced','dense_add|1|1024|1024|False|bf16|bf16|bf16|none|nt|plain|reduced|False|0||||','dense_add',1,8,1024,1024,0,'bf16','bf16','bf16','none','nt','plain','reduced',0,0,NULL,NULL,NULL,NULL,16,8,16777216.0,2129920.0);
INSERT INTO "problem" VALUES(6,'scaled:fp8_e4m3>bf16:16x2112x7168,scale=row','scaled|1|2112|7168|False|fp8_e4m3|fp8_e4m3|bf16|row|nt|plain|ieee|False|0||||','scaled',1,16,2112,7168,0,'fp8_e4m3','fp8_e4m3','bf16','row','nt','plain','ieee',0,0,NULL,NULL,NULL,NULL,16,16,484442112.0,15321088.0);
INSERT INTO "problem" VALUES(7,'grouped:bf16:256x128x1536x7168,math=reduced','grouped|256|1536|7168|False|bf16|bf16|bf16|none|nt|plain|reduced|False|0||||','grouped',256,128,1536,7168,0,'bf16','bf16','bf16','none','nt','plain','reduced',0,0,NULL,NULL,NULL,NULL,128,128,721554505728.0,6207569920.0);
INSERT INTO "problem" VALUES(8,'fp32:1x512x256,threads=2','dense|1|512|256|False|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,1,512,256,0,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,16,1,262144.0,527360.0);
INSERT INTO "problem" VALUES(9,'fp32:8x512x256+bias,threads=2','dense|1|512|256|True|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,8,512,256,1,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,16,8,2097152.0,548864.0);
INSERT INTO "problem" VALUES(10,'fp32:32x512x256,threads=2','dense|1|512|256|False|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,32,512,256,0,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,32,32,8388608.0,622592.0);
INSERT INTO "problem" VALUES(11,'fp32:17x1024x256,threads=2','dense|1|1024|256|False|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,17,1024,256,0,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,32,32,8912896.0,1135616.0);
INSERT INTO "problem" VALUES(12,'fp32:19x1024x256,threads=2','dense|1|1024|256|False|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,19,1024,256,0,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,32,32,9961472.0,1145856.0);
INSERT INTO "problem" VALUES(13,'fp32:21x1024x256,threads=2','dense|1|1024|256|False|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,21,1024,256,0,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,32,32,11010048.0,1156096.0);
INSERT INTO "problem" VALUES(14,'fp32:30x1024x256,threads=2','dense|1|1024|256|False|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,30,1024,256,0,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,32,32,15728640.0,1202176.0);
INSERT INTO "problem" VALUES(15,'fp32:32x1024x256,threads=2','dense|1|1024|256|False|fp32|fp32|fp32|none|nt|plain|ieee|False|2||||','dense',1,32,1024,256,0,'fp32','fp32','fp32','none','nt','plain','ieee',0,2,NULL,NULL,NULL,NULL,32,32,16777216.0,1212416.0);
INSERT INTO "problem" VALUES(16,'bf16:64x4096x7168','dense|1|4096|7168|False|bf16|bf16|bf16|none|nt|plain|ieee|False|0||||','dense',1,64,4096,7168,0,'bf16','bf16','bf16','none','nt','plain','ieee',0,0,NULL,NULL,NULL,NULL,64,64,3758096384.0,60162048.0);
CREATE TABLE publication (
    generation INTEGER PRIMARY KEY,
    published_us INTEGER NOT NULL,
    installed INTEGER NOT NULL,
    retired INTEGER NOT NULL,
    note TEXT NOT NULL
) STRICT;
INSERT INTO "publication" VALUES(1,1794895600000000,1,0,'installed');
INSERT INTO "publication" VALUES(2,1794960400000000,1,0,'installed');
INSERT INTO "publication" VALUES(3,1794960400000000,1,0,'installed');
INSERT INTO "publication" VALUES(4,1794964000000000,1,0,'installed');
INSERT INTO "publication" VALUES(5,1794964000000000,1,0,'installed');
INSERT INTO "publication" VALUES(6,1794967600000000,1,1,'installed');
INSERT INTO "publication" VALUES(7,1794960400000000,1,0,'installed');
INSERT INTO "publication" VALUES(8,1794960400000000,1,0,'installed');
INSERT INTO "publication" VALUES(9,1794960400000000,1,0,'installed');
INSERT INTO "publication" VALUES(10,1794982000000000,1,0,'installed');
INSERT INTO "publication" VALUES(11,1794992800000000,0,1,'withdrawn: slow in serving');
CREATE TABLE quarantine (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER NOT NULL REFERENCES problem,
    device TEXT NOT NULL,
    mode TEXT NOT NULL,
    covers TEXT NOT NULL,
    backend TEXT NOT NULL,
    config TEXT NOT NULL,
    stamp TEXT NOT NULL,
    reason TEXT NOT NULL,
    run TEXT NOT NULL,
    reports INTEGER NOT NULL,
    last_seen_us INTEGER NOT NULL,
    taken_us INTEGER,
    UNIQUE (problem_id, device, mode, covers, backend, config, stamp)
) STRICT;
INSERT INTO "quarantine" VALUES(1,2,'cuda-nvidia-h200-132','eager','exact','triton','{"kernel":"fragments","rows":4}','3.6.0/sm_90/aaaaaaaaaaaa','went wrong','serve',1,1794989200000000,1794989200000000);
CREATE TABLE roofline (
    kind TEXT PRIMARY KEY,
    flops_per_us REAL NOT NULL,
    bytes_per_us REAL NOT NULL,
    call_us REAL NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "roofline" VALUES('cpu',50000.0,10000.0,0.0);
INSERT INTO "roofline" VALUES('cuda',100000000.0,1500000.0,4.0);
INSERT INTO "roofline" VALUES('rocm',100000000.0,1500000.0,4.0);
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (length(name) <= 512)
) STRICT;
INSERT INTO "run" VALUES(1,'serve');
INSERT INTO "run" VALUES(2,'train');
INSERT INTO "run" VALUES(3,'bert');
CREATE TABLE session (
    host TEXT NOT NULL CHECK (length(host) <= 512),
    pid INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    run TEXT NOT NULL CHECK (length(run) <= 512),
    path TEXT NOT NULL,
    generation INTEGER NOT NULL,
    active_us INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    dropped INTEGER NOT NULL,
    errors INTEGER NOT NULL,
    reload_failures INTEGER NOT NULL,
    note TEXT NOT NULL,
    sqlite_version TEXT NOT NULL,
    store_dev INTEGER NOT NULL,
    store_ino INTEGER NOT NULL,
    beat_us INTEGER NOT NULL,
    ended_us INTEGER, rank INTEGER, namespace TEXT CHECK (length(namespace) <= 100),
    PRIMARY KEY (host, pid, started_us)
) STRICT, WITHOUT ROWID;
CREATE TABLE sighting (
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    run_id INTEGER NOT NULL REFERENCES run,
    hour INTEGER NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('miss', 'exact', 'padded')),
    graph INTEGER NOT NULL CHECK (graph IN (0, 1)),
    calls INTEGER NOT NULL CHECK (calls >= 0),
    sampled_calls INTEGER NOT NULL CHECK (sampled_calls >= 0),
    sampled_us REAL NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (problem_id, environment_id, run_id, hour, outcome, graph)
) STRICT, WITHOUT ROWID;
INSERT INTO "sighting" VALUES(1,1,1,498581,'miss',0,700,0,0.0,1794892000000000);
INSERT INTO "sighting" VALUES(1,1,1,498591,'exact',0,5000,0,0.0,1794928000000000);
INSERT INTO "sighting" VALUES(1,2,1,498599,'miss',0,70,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(1,2,1,498603,'exact',0,9000,0,0.0,1794971200000000);
INSERT INTO "sighting" VALUES(1,2,2,498609,'exact',0,10,0,0.0,1794992800000000);
INSERT INTO "sighting" VALUES(2,1,1,498581,'miss',0,300,0,0.0,1794892000000000);
INSERT INTO "sighting" VALUES(2,2,1,498599,'miss',0,30,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(2,2,1,498603,'exact',1,800,0,0.0,1794971200000000);
INSERT INTO "sighting" VALUES(3,1,1,498581,'miss',0,100,0,0.0,1794892000000000);
INSERT INTO "sighting" VALUES(3,2,1,498599,'miss',1,60,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(4,2,1,498599,'miss',0,11,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(4,2,1,498603,'exact',0,100,0,0.0,1794971200000000);
INSERT INTO "sighting" VALUES(5,2,1,498599,'miss',0,500,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(6,2,1,498599,'miss',0,40,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(6,2,2,498609,'miss',0,4,0,0.0,1794992800000000);
INSERT INTO "sighting" VALUES(7,2,1,498599,'miss',0,7,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(8,3,3,498599,'miss',0,50,10,400.0,1794956800000000);
INSERT INTO "sighting" VALUES(8,3,3,498605,'exact',0,5000,0,0.0,1794978400000000);
INSERT INTO "sighting" VALUES(9,3,3,498599,'miss',0,20,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(9,3,3,498605,'exact',0,600,0,0.0,1794978400000000);
INSERT INTO "sighting" VALUES(10,3,3,498599,'miss',0,10,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(11,3,3,498599,'miss',0,5,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(12,3,3,498599,'miss',0,5,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(12,3,3,498605,'padded',0,70,0,0.0,1794978400000000);
INSERT INTO "sighting" VALUES(13,3,3,498599,'miss',0,5,0,0.0,1794956800000000);
INSERT INTO "sighting" VALUES(14,3,3,498599,'miss',0,5,0,0.0,1794956800000000);
CREATE TABLE solution (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER NOT NULL REFERENCES problem,         -- with the padded M when covers is not exact
    device_id INTEGER NOT NULL REFERENCES device,
    environment_id INTEGER NOT NULL REFERENCES environment, -- where it was measured
    mode TEXT NOT NULL CHECK (mode IN ('eager', 'graph')),
    covers TEXT NOT NULL CHECK (covers IN ('exact', 'fine', 'coarse')),
    backend TEXT NOT NULL CHECK (length(backend) <= 200),
    config TEXT NOT NULL CHECK (length(config) <= 4096),
    stamp TEXT NOT NULL CHECK (length(stamp) <= 4096),      -- where it may be used: environments with this backend at this stamp
    us REAL NOT NULL CHECK (us > 0),
    baseline_us REAL NOT NULL CHECK (baseline_us > 0),
    gain_low REAL NOT NULL,
    err REAL NOT NULL,
    baseline_err REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('published', 'default_best', 'withdrawn', 'pinned', 'stale')),
    generation INTEGER NOT NULL REFERENCES publication,
    published_us INTEGER NOT NULL,
    retired_generation INTEGER REFERENCES publication,      -- NULL while it is live
    retired_us INTEGER,
    reason TEXT NOT NULL DEFAULT '', launch TEXT NOT NULL DEFAULT ''
    CHECK (length(launch) <= 4096), conditions TEXT NOT NULL DEFAULT ''
    CHECK (length(conditions) <= 512), recheck TEXT
    CHECK (recheck IN ('conditions', 'asked', 'drift')), others REAL CHECK (others BETWEEN 0 AND 1),                        -- why it was retired
    CHECK ((retired_generation IS NULL) = (state IN ('published', 'default_best', 'pinned')))
) STRICT;
INSERT INTO "solution" VALUES(1,1,1,1,'eager','exact','triton','{"kernel":"gemv","rows":4}','3.6.0/sm_90/aaaaaaaaaaaa',5.0,10.0,1.96,0.001,0.001,'published',1,1794895600000000,NULL,NULL,'','{"arguments":["x","w","y","m","ldx","ldw"],"binary":"93f5b00c8d4f6590241da2d632f5a98b625747657bed30b6b92b172c05a56659","cluster":1,"counters_bytes":0,"grid":[{"block":64,"over":"n"},{"block":1,"over":""},{"block":1,"over":""}],"ld_multiple":8,"max_m":1,"name":"kernel","null_pointers":0,"partials_offset":0,"pointer_align":16,"shared":0,"warp_size":32,"warps":4,"workspace_bytes":0}','',NULL,NULL);
INSERT INTO "solution" VALUES(2,1,1,2,'eager','exact','triton','{"kernel":"gemv","rows":8}','3.6.0/sm_90/f64e03e6295b',4.0,10.0,2.45,0.001,0.001,'published',2,1794960400000000,NULL,NULL,'','{"arguments":["x","w","y","m","ldx","ldw"],"binary":"93f5b00c8d4f6590241da2d632f5a98b625747657bed30b6b92b172c05a56659","cluster":1,"counters_bytes":0,"grid":[{"block":64,"over":"n"},{"block":1,"over":""},{"block":1,"over":""}],"ld_multiple":8,"max_m":1,"name":"kernel","null_pointers":0,"partials_offset":0,"pointer_align":16,"shared":0,"warp_size":32,"warps":4,"workspace_bytes":0}','',NULL,NULL);
INSERT INTO "solution" VALUES(3,2,1,2,'eager','exact','triton','{"kernel":"fragments","rows":8}','3.6.0/sm_90/f64e03e6295b',5.0,10.0,1.96,0.001,0.001,'published',3,1794960400000000,NULL,NULL,'','{"arguments":["x","w","y","m","ldx","ldw"],"binary":"93f5b00c8d4f6590241da2d632f5a98b625747657bed30b6b92b172c05a56659","cluster":1,"counters_bytes":0,"grid":[{"block":64,"over":"n"},{"block":1,"over":""},{"block":1,"over":""}],"ld_multiple":8,"max_m":4,"name":"kernel","null_pointers":0,"partials_offset":0,"pointer_align":16,"shared":0,"warp_size":32,"warps":4,"workspace_bytes":0}','',NULL,NULL);
INSERT INTO "solution" VALUES(4,3,1,2,'eager','exact','cuda','{"kernel":"one_shot","rows":64}','13.0/sm_90/6813ed7ea8aa',5.0,10.0,1.96,0.001,0.001,'withdrawn',4,1794964000000000,11,1794992800000000,'slow in serving','{"arguments":["x","w","y","m","ldx","ldw"],"binary":"93f5b00c8d4f6590241da2d632f5a98b625747657bed30b6b92b172c05a56659","cluster":1,"counters_bytes":0,"grid":[{"block":64,"over":"n"},{"block":1,"over":""},{"block":1,"over":""}],"ld_multiple":8,"max_m":8,"name":"kernel","null_pointers":0,"partials_offset":0,"pointer_align":16,"shared":0,"warp_size":32,"warps":4,"workspace_bytes":0}','',NULL,NULL);
INSERT INTO "solution" VALUES(5,4,1,2,'eager','exact','cublaslt','{"tile":20}','130100/sm_90',5.0,10.0,1.96,0.001,0.001,'stale',5,1794964000000000,6,1794967600000000,'superseded by generation 6','{"algo":"00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000","dtype":"bf16","layout":"nt","ld_multiple":8,"library":"cublaslt","max_m":64,"pointer_align":16,"tf32":false,"workspace_bytes":0}','',NULL,NULL);
INSERT INTO "solution" VALUES(6,4,1,2,'eager','exact','cublaslt','{"tile":21}','130100/sm_90',4.5,10.0,2.17777777777777803436e+00,0.001,0.001,'published',6,1794967600000000,NULL,NULL,'','{"algo":"00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000","dtype":"bf16","layout":"nt","ld_multiple":8,"library":"cublaslt","max_m":64,"pointer_align":16,"tf32":false,"workspace_bytes":0}','',NULL,NULL);
INSERT INTO "solution" VALUES(7,8,2,3,'eager','exact','torch_mv','{}','2.13.0',5.0,10.0,1.96,0.001,0.001,'published',7,1794960400000000,NULL,NULL,'','','',NULL,NULL);
INSERT INTO "solution" VALUES(8,9,2,3,'eager','exact','onednn','{}','2.13.0/cpu-test-0',5.0,10.0,1.96,0.001,0.001,'pinned',8,1794960400000000,NULL,NULL,'','','',NULL,NULL);
INSERT INTO "solution" VALUES(9,15,2,3,'eager','fine','torch_swap','{}','2.13.0',5.0,10.0,1.96,0.001,0.001,'published',9,1794960400000000,NULL,NULL,'','','',NULL,NULL);
INSERT INTO "solution" VALUES(10,10,2,3,'eager','exact','torch','{}','2.13.0',10.0,10.0,0.98,0.001,0.001,'default_best',10,1794982000000000,NULL,NULL,'','','',NULL,NULL);
CREATE TABLE taken (
    source TEXT NOT NULL CHECK (length(source) <= 200),     -- which file: device and inode
    sighting TEXT NOT NULL CHECK (length(sighting) <= 64),  -- hash of a sighting's key there
    calls INTEGER NOT NULL,                                 -- so much of it is in our own tables already
    sampled_calls INTEGER NOT NULL,
    sampled_us REAL NOT NULL,
    last_seen_us INTEGER NOT NULL,
    PRIMARY KEY (source, sighting)
) STRICT, WITHOUT ROWID;
CREATE TABLE trial (
    id INTEGER PRIMARY KEY,
    problem_id INTEGER NOT NULL REFERENCES problem,
    environment_id INTEGER NOT NULL REFERENCES environment,
    mode TEXT NOT NULL CHECK (mode IN ('eager', 'graph')),
    backend TEXT NOT NULL CHECK (length(backend) <= 200),
    config TEXT NOT NULL CHECK (length(config) <= 4096),
    phase TEXT NOT NULL CHECK (length(phase) <= 100),
    us REAL,                                                -- NULL: it did not get that far
    err REAL,                                               -- relative RMS error against the reference
    outcome TEXT NOT NULL CHECK (length(outcome) <= 100),
    note TEXT NOT NULL,
    owner TEXT NOT NULL,
    started_us INTEGER NOT NULL,
    UNIQUE (problem_id, environment_id, mode, backend, config, phase)
) STRICT;
INSERT INTO "trial" VALUES(1,10,3,'eager','torch','{}','screen',10.0,1.0e-07,'ok','','host:1',1794982000000000);
INSERT INTO "trial" VALUES(2,10,3,'eager','onednn','{}','screen',NULL,NULL,'crash','worker killed by SIGSEGV','host:1',1794982000000000);
CREATE TABLE work (
    problem_id INTEGER NOT NULL REFERENCES problem,         -- with the padded M when covers is not exact
    environment_id INTEGER NOT NULL REFERENCES environment,
    covers TEXT NOT NULL CHECK (covers IN ('exact', 'fine', 'coarse')),
    mode TEXT NOT NULL CHECK (mode IN ('eager', 'graph')),
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'failed')),
    owner TEXT CHECK (length(owner) <= 512),                -- "host:pid", NULL when nobody holds it
    attempts INTEGER NOT NULL,
    leased_us INTEGER NOT NULL,                             -- last lease or renewal; in the future means the clock went back
    lease_until_us INTEGER NOT NULL,                        -- in the past means free
    retry_us INTEGER NOT NULL DEFAULT 0,                    -- not before this, after a failure
    reason TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (problem_id, environment_id, covers, mode)
) STRICT, WITHOUT ROWID;
INSERT INTO "work" VALUES(3,2,'exact','eager','failed',NULL,0,1794992800000000,1794992800000000,0,'withdrawn: slow in serving');
INSERT INTO "work" VALUES(5,2,'exact','eager','open',NULL,0,1794996760000000,1794997120000000,0,'put off: others use 40% of the device');
INSERT INTO "work" VALUES(7,2,'exact','eager','failed',NULL,3,1794992800000000,1794992800000000,1794996640000000,'grouped:bf16:256x128x1536x7168,math=reduced: family grouped cannot be tuned yet');
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE INDEX sighting_by_hour ON sighting (hour);
CREATE INDEX solution_by_problem ON solution (problem_id, environment_id, generation);
CREATE UNIQUE INDEX solution_live ON solution (problem_id, device_id, covers, mode, backend, stamp)
    WHERE retired_generation IS NULL;
CREATE VIEW verdict AS
SELECT d.problem_id, d.environment_id,
    coalesce(
        (SELECT s.id FROM solution s
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            WHERE s.problem_id = d.problem_id AND s.device_id = e.device_id AND s.covers = 'exact'
                AND s.retired_generation IS NULL
            ORDER BY s.generation DESC LIMIT 1),
        (SELECT s.id FROM problem b
            JOIN solution s ON s.problem_id = b.id AND s.device_id = e.device_id AND s.covers = 'fine'
                AND s.retired_generation IS NULL
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            WHERE b.rest = p.rest AND b.m = p.m_fine
            ORDER BY s.generation DESC LIMIT 1),
        (SELECT s.id FROM problem b
            JOIN solution s ON s.problem_id = b.id AND s.device_id = e.device_id AND s.covers = 'coarse'
                AND s.retired_generation IS NULL
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            WHERE b.rest = p.rest AND b.m = p.m_coarse
            ORDER BY s.generation DESC LIMIT 1)
    ) AS solution_id
FROM demand d
JOIN problem p ON p.id = d.problem_id
JOIN environment e ON e.id = d.environment_id;
CREATE VIEW coverage AS
WITH recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls
    FROM sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id
),
known AS MATERIALIZED (  -- else SQLite would look the verdict up again for every column that uses it
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT p.family, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.covered THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY p.family, h.id;
CREATE VIEW coverage_by_run AS
WITH recent AS (
    SELECT problem_id, environment_id, run_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls,
        sum(calls * graph) AS graph_calls,
        min(hour) AS first_hour, max(hour) AS last_hour
    FROM sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id, run_id
),
known AS MATERIALIZED (  -- else SQLite would look the verdict up again for every column that uses it
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT r.name AS run, h.key AS device,
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.covered THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN run r ON r.id = t.run_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.run_id, h.id;
CREATE VIEW coverage_by_problem AS
WITH recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls,
        sum(calls * graph) AS graph_calls,
        min(hour) AS first_hour, max(hour) AS last_hour
    FROM sighting WHERE hour >= CAST(strftime('%s', 'now') AS INTEGER) / 3600 - 24
        AND last_seen_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000
    GROUP BY problem_id, environment_id
),
known AS MATERIALIZED (  -- else SQLite would look the verdict up again for every column that uses it
    SELECT t.*, c.us, c.solution_id IS NOT NULL AS covered
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device,
    1 AS problems,
    max(t.covered) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
GROUP BY t.problem_id, h.id;
CREATE VIEW untuned AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, d.calls, d.calls * u.us AS est_time_us,
    0.3 * u.us * coalesce((
        SELECT sum(1.0 * s.calls / (1 << min(max((CAST(strftime('%s', 'now') AS INTEGER) / 3600 - s.hour) / 24, 0), 40)))
        FROM sighting s WHERE s.problem_id = d.problem_id AND s.environment_id = d.environment_id), 0) AS worth,
    0.3 * d.calls * u.us AS est_saving_us,
    CASE WHEN w.state = 'failed' THEN 'failed'
        WHEN w.owner IS NOT NULL AND w.lease_until_us > CAST(strftime('%s', 'now') AS INTEGER) * 1000000 THEN 'leased'
        ELSE 'queued' END AS state,
    d.last_seen_us AS last_seen, u.covers, u.unit_m, coalesce(w.attempts, 0) AS attempts, coalesce(w.reason, '') AS reason,
    w.owner, e.key AS environment
FROM unit u
JOIN demand d ON d.environment_id = u.environment_id AND d.problem_id = u.problem_id
JOIN problem p ON p.id = u.problem_id
JOIN environment e ON e.id = u.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id AND w.covers = u.covers AND w.mode = 'eager'
WHERE u.solution_id IS NULL;
CREATE VIEW trials AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, t.mode, t.backend, t.config, t.phase, t.us, t.err, t.outcome, t.note, t.started_us AS started, t.owner,
    e.key AS environment
FROM trial t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id;
CREATE VIEW compiled AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, c.kernel, c.first_seen_us AS first_seen, c.last_seen_us AS last_seen
FROM compiled_gemm c
JOIN problem p ON p.id = c.problem_id
JOIN run r ON r.id = c.run_id
JOIN environment e ON e.id = c.environment_id
JOIN device h ON h.id = e.device_id;
CREATE INDEX solution_to_recheck ON solution (recheck) WHERE recheck IS NOT NULL;
CREATE INDEX trial_that_killed ON trial (backend, config) WHERE outcome IN ('crash', 'hang');
CREATE VIEW unit AS
SELECT problem_id, environment_id, rest, m, calls, solution_id, us,
    CASE WHEN sizes > 3 THEN 'fine' ELSE 'exact' END AS covers,
    CASE WHEN sizes > 3 THEN m_fine ELSE m END AS unit_m
FROM (
    SELECT c.problem_id, c.environment_id, c.solution_id, c.us, d.calls, p.rest, p.m, p.m_fine,
        count(*) OVER (PARTITION BY c.environment_id, p.rest, p.m_fine) AS sizes
    FROM problem_cost c
    JOIN demand d ON d.environment_id = c.environment_id AND d.problem_id = c.problem_id
    JOIN problem p ON p.id = c.problem_id
);
CREATE INDEX hint_by_problem ON hint (problem_id);
CREATE VIEW hints AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.kind, h.backend, h.config, h.arch, h.units, h.us, h.format, h.family AS table_family, h.source, h.line,
    h.text AS row, h.imported_us AS imported
FROM hint h LEFT JOIN problem p ON p.id = h.problem_id;
CREATE VIEW frozen AS
SELECT p.text AS problem,
    p.family, p.batch, p.m, p.n, p.k, p.bias, p.dtype, p.wdtype, p.out_dtype, p.scale, p.layout, p.weight_state,
    p.math_mode, p.deterministic, p.threads, p.experts, p.topk, p."inter", p.act,
    h.key AS device, r.name AS run, sum(g.calls) AS calls, s.generation, max(g.last_seen_us) AS last_seen
FROM sighting g
JOIN verdict v ON v.problem_id = g.problem_id AND v.environment_id = g.environment_id
JOIN solution s ON s.id = v.solution_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id
WHERE g.graph = 1 AND g.outcome = 'miss' AND s.state <> 'default_best'
    AND g.last_seen_us > s.published_us + 10000000
GROUP BY g.problem_id, g.environment_id, g.run_id;
CREATE VIEW sessions AS
SELECT host, pid, run, path, generation, active_us, calls, dropped, errors, reload_failures, note,
    CASE WHEN ended_us IS NOT NULL THEN 'ended'
        WHEN beat_us >= (CAST(strftime('%s', 'now') AS INTEGER) - 30) * 1000000 THEN 'live'
        ELSE 'silent' END AS state,
    started_us AS started, beat_us AS last_seen, ended_us AS ended, sqlite_version, store_dev, store_ino, rank, namespace
FROM session;
CREATE VIEW problem_cost AS
SELECT c.problem_id, c.environment_id, c.solution_id,
    CASE WHEN s.others > 0.15 AND c.sampled_calls >= 4 THEN c.sampled_us
        ELSE coalesce(s.baseline_us, c.sampled_us, c.roofline_us) END AS us,
    s.baseline_us AS measured_us, c.sampled_us, c.roofline_us
FROM (
    SELECT v.problem_id, v.environment_id, v.solution_id,
        coalesce(
            (SELECT s.id FROM solution s
                WHERE s.problem_id = v.problem_id AND s.environment_id = v.environment_id
                ORDER BY s.generation DESC LIMIT 1),
            v.solution_id
        ) AS measured_id,
        d.sampled_calls, d.sampled_us / nullif(d.sampled_calls, 0) AS sampled_us,
        p.flops / r.flops_per_us + p.bytes / r.bytes_per_us + r.call_us AS roofline_us
    FROM verdict v
    JOIN demand d ON d.environment_id = v.environment_id AND d.problem_id = v.problem_id
    JOIN problem p ON p.id = v.problem_id
    JOIN environment e ON e.id = v.environment_id
    JOIN device h ON h.id = e.device_id
    JOIN roofline r ON r.kind = CASE WHEN h.kind IN ('cuda', 'rocm') THEN h.kind ELSE 'cpu' END
) c
LEFT JOIN solution s ON s.id = c.measured_id;
CREATE VIEW solutions AS
SELECT problem, family, batch, m, n, k, bias, dtype, wdtype, out_dtype, scale, layout, weight_state,
    math_mode, deterministic, threads, experts, topk, "inter", act,
    device, mode, covers, backend, config, us, baseline_us, speedup,
    hit_calls * (baseline_us - us) * price AS saved_us, hit_calls,
    gain_low, err, baseline_err, tflops, gb_s, environment, stamp, generation, state, published, retired, reason, others, recheck
FROM (
    SELECT p.text AS problem, p.*, h.key AS device, s.mode, s.covers, s.backend, s.config, s.us, s.baseline_us,
        s.baseline_us / s.us AS speedup,
        coalesce((
            SELECT sum(g.calls) FROM problem q
            JOIN sighting g ON g.problem_id = q.id
            JOIN environment_stamp a ON a.environment_id = g.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            JOIN environment ge ON ge.id = g.environment_id AND ge.device_id = s.device_id
            WHERE q.rest = p.rest
                AND q.m > CASE s.covers WHEN 'exact' THEN p.m - 1 WHEN 'fine' THEN p.m - 128 ELSE p.m / 2 END
                AND q.m <= CASE WHEN s.covers = 'coarse' AND p.m >= 8192 THEN 2147483647 ELSE p.m END
                AND p.m = CASE s.covers WHEN 'exact' THEN q.m WHEN 'fine' THEN q.m_fine ELSE q.m_coarse END
                AND g.outcome = CASE s.covers WHEN 'exact' THEN 'exact' ELSE 'padded' END
                AND g.graph = (s.mode = 'graph')
                AND g.hour >= s.published_us / 3600000000
                AND s.generation IS NOT s.retired_generation
                AND (s.retired_us IS NULL OR g.hour < s.retired_us / 3600000000
                    OR (g.hour = s.retired_us / 3600000000 AND NOT EXISTS (
                        SELECT 1 FROM solution l
                        JOIN environment_stamp la ON la.environment_id = g.environment_id AND la.backend = l.backend
                            AND la.stamp = l.stamp
                        WHERE l.problem_id = s.problem_id AND l.id > s.id AND l.device_id = s.device_id
                            AND l.covers = s.covers AND l.mode = s.mode AND l.generation IS NOT l.retired_generation
                            AND l.published_us / 3600000000 <= g.hour)))), 0) AS hit_calls,
        CASE WHEN s.others > 0.15 THEN coalesce((
            SELECT CASE WHEN sum(d.sampled_calls) >= 4
                THEN sum(d.sampled_us) / sum(d.sampled_calls) / s.baseline_us END
            FROM problem q
            JOIN demand d ON d.problem_id = q.id
            JOIN environment_stamp a ON a.environment_id = d.environment_id AND a.backend = s.backend AND a.stamp = s.stamp
            JOIN environment de ON de.id = d.environment_id AND de.device_id = s.device_id
            WHERE q.rest = p.rest
                AND q.m > CASE s.covers WHEN 'exact' THEN p.m - 1 WHEN 'fine' THEN p.m - 128 ELSE p.m / 2 END
                AND q.m <= CASE WHEN s.covers = 'coarse' AND p.m >= 8192 THEN 2147483647 ELSE p.m END
                AND p.m = CASE s.covers WHEN 'exact' THEN q.m WHEN 'fine' THEN q.m_fine ELSE q.m_coarse END
        ), 1.0) ELSE 1.0 END AS price,
        s.gain_low, s.err, s.baseline_err, p.flops / s.us / 1e6 AS tflops, p.bytes / s.us / 1e3 AS gb_s,
        e.key AS environment, s.stamp, s.generation, s.state, s.published_us AS published, s.retired_us AS retired,
        s.reason, s.others, s.recheck
    FROM solution s
    JOIN problem p ON p.id = s.problem_id
    JOIN device h ON h.id = s.device_id
    JOIN environment e ON e.id = s.environment_id
);
COMMIT;
PRAGMA application_id = 1196250197;
PRAGMA user_version = 12;
