-- 0018_no_index_of_before: rows of before step 0016 are brought over in the order of their key, and this index kept them
-- spread over the file: each slice wrote one page of it for each row.
DROP INDEX IF EXISTS sighting_by_hour;
