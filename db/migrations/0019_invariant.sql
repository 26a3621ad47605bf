-- 0019_invariant: one solution for every M, for programs that want the bits of a row to be the same in every batch.
-- Such a problem has m = 256, whatever was called, and `batch_invariant=1` in its key.
ALTER TABLE problem ADD COLUMN batch_invariant INTEGER NOT NULL DEFAULT 0 CHECK (batch_invariant IN (0, 1));
