-- 0021_programs_of_0_1_0: a program of version 0.1.0 that has the file open while it is brought up to date goes on writing.
-- What it writes names a stamp for each backend and no kernel: it is refused whole, in words that its log then has.
CREATE TRIGGER environment_stamp_of_0_1_0 BEFORE INSERT ON environment_stamp WHEN NEW.kernel IS NULL
BEGIN
    SELECT raise(ABORT, 'a newer gemmtuned has brought this database up to date: upgrade gemmtuned here too, and restart');
END;
