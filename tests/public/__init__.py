"""What is public, as text files that the code makes: see docs/reference/versions.md.

python -m tests.public.write        renew the files
"""
