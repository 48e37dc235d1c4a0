! Each routine from Fortran, with integers of 4 bytes, or of 8 with -fdefault-integer-8. The process grid has one rank.
program routines
    use mpi
    use pmm3d
    use, intrinsic :: iso_c_binding, only: c_int
    implicit none
    integer, parameter :: n = 6, d = kind(1d0)
    integer :: context, grid, desc(9), info, plan, request, matrices(3), i, j, box(4), wrong
    integer(c_int) :: ierr, rank, ranks
    real(d), target :: a(n, n), b(n, n), c(n, n), x(n, n), s(n, n), low(n, n)
    complex(d), target :: za(n, n), zb(n, n), zc(n, n)
    real(d) :: whole(n, n)

    call MPI_Init(ierr)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)
    call ok(pmm3d_start())
    call ok(pmm3d_context(MPI_COMM_WORLD, 1, 1, 'R', context))
    call ok(pmm3d_grid(MPI_COMM_WORLD, 1, 1, int(ranks), grid))
    call ok(pmm3d_library(grid, 'numpy'))
    desc = [1, 0, n, n, 2, 2, 0, 0, n]
    wrong = 0
    do j = 1, n
        do i = 1, n
            a(i, j) = mod(i*5 + j*3, 7) - 3
            b(i, j) = mod(i*2 + j*5, 11) - 5
            s(i, j) = merge(n*7, mod(i + j, 5), i == j)
            low(i, j) = merge(s(i, j), 0d0, i >= j)
        end do
    end do
    za = cmplx(a, b, d)
    zb = cmplx(b, s, d)

    c = 1
    call ok(pmm3d_pgemm(context, 'd', 'N', 't', n, n, n, 2d0, a, 1, 1, desc, b, 1, 1, desc, 3d0, c, 1, 1, desc))
    call same('pgemm', c, 2*matmul(a, transpose(b)) + 3)
    call ok(pmm3d_pgemr2d('d', 4, 3, a, 2, 1, desc, context, c, 1, 3, desc, context))
    call same('pgemr2d', c(1:4, 3:5), a(2:5, 1:3))
    c = b
    call ok(pmm3d_ptran(context, 'd', n, n, 2d0, a, 1, 1, desc, 1d0, c, 1, 1, desc))
    call ok(pmm3d_ptranu(context, 'd', n, n, 1d0, a, 1, 1, desc, 1d0, c, 1, 1, desc))
    call ok(pmm3d_ptranc(context, 'd', n, n, 1d0, a, 1, 1, desc, 1d0, c, 1, 1, desc))
    call same('ptran', c, 4*transpose(a) + b)
    call ok(pmm3d_pgeadd(context, 'd', 'N', n, n, 2d0, a, 1, 1, desc, 0d0, c, 1, 1, desc))
    call same('pgeadd', c, 2*a)
    c = 0
    call ok(pmm3d_psyrk(context, 'd', 'L', 'N', n, n, 1d0, a, 1, 1, desc, 0d0, c, 1, 1, desc))
    call ok(pmm3d_psyr2k(context, 'd', 'L', 'T', n, n, 1d0, a, 1, 1, desc, b, 1, 1, desc, 1d0, c, 1, 1, desc))
    whole = matmul(a, transpose(a)) + matmul(transpose(a), b) + matmul(transpose(b), a)
    call same('rank k', c, lower(whole))
    zc = 0
    call ok(pmm3d_pherk(context, 'z', 'L', 'N', n, n, 1d0, za, 1, 1, desc, 0d0, zc, 1, 1, desc))
    call ok(pmm3d_pher2k(context, 'z', 'L', 'N', n, n, (2d0, 1d0), za, 1, 1, desc, zb, 1, 1, desc, 1d0, zc, 1, 1, desc))
    zb = matmul(za, conjg(transpose(za))) + (2d0, 1d0)*matmul(za, conjg(transpose(zb))) &
         + (2d0, -1d0)*matmul(zb, conjg(transpose(za)))
    call same('Hermitian rank k', [real(zc), aimag(zc)], [lower(real(zb)), lower(aimag(zb))])
    call ok(pmm3d_psymm(context, 'd', 'L', 'L', n, n, 1d0, s, 1, 1, desc, b, 1, 1, desc, 0d0, c, 1, 1, desc))
    call same('psymm', c, matmul(s, b))
    call ok(pmm3d_phemm(context, 'd', 'R', 'U', n, n, 1d0, s, 1, 1, desc, b, 1, 1, desc, 1d0, c, 1, 1, desc))
    call same('phemm', c, matmul(s, b) + matmul(b, s))
    x = b
    call ok(pmm3d_ptrmm(context, 'd', 'L', 'L', 'N', 'N', n, n, 1d0, s, 1, 1, desc, x, 1, 1, desc))
    call same('ptrmm', x, matmul(low, b))
    call ok(pmm3d_ptrsm(context, 'd', 'L', 'L', 'N', 'N', n, n, 1d0, s, 1, 1, desc, x, 1, 1, desc))
    call same('ptrsm', x, b)
    c = s
    call ok(pmm3d_ppotrf(context, 'd', 'L', n, c, 1, 1, desc, info))
    call same('ppotrf', matmul(lower(c), transpose(lower(c))), s)
    x = matmul(s, b)
    call ok(pmm3d_ppotrs(context, 'd', 'L', n, n, c, 1, 1, desc, x, 1, 1, desc, info))
    call same('ppotrs', x, b)
    c = s
    x = matmul(s, a)
    call ok(pmm3d_pposv(context, 'd', 'L', n, n, c, 1, 1, desc, x, 1, 1, desc, info))
    call same('pposv', x, a)
    c = low
    call ok(pmm3d_ptrtri(context, 'd', 'L', 'N', n, c, 1, 1, desc, info))
    call same('ptrtri', matmul(lower(c), low), reshape([((merge(1d0, 0d0, i == j), i=1, n), j=1, n)], [n, n]))
    c = -s
    call ok(pmm3d_ppotrf(context, 'd', 'L', n, c, 1, 1, desc, info))
    if (info /= 1) wrong = wrong + 1
    if (pmm3d_ppotrf(context, 'd', 'X', n, c, 1, 1, desc, info) /= PMM3D_ERROR_ARGUMENT .or. info /= -1) &
        wrong = wrong + 1

    ! Plans: begun, and run with other arrays.
    call ok(pmm3d_plan_pgemm(context, 'd', 'N', 'N', n, n, n, 1d0, a, 1, 1, desc, b, 1, 1, desc, 0d0, c, 1, 1, desc, plan))
    call ok(pmm3d_begin(plan, request))
    call ok(pmm3d_wait(request))
    call same('begun', c, matmul(a, b))
    call ok(pmm3d_run_pgemm(plan, 2d0, b, a, 0d0, x))
    call same('other arrays', x, 2*matmul(b, a))
    call ok(pmm3d_free(plan))
    call ok(pmm3d_plan_pgeadd(context, 'd', 'T', n, n, 1d0, a, 1, 1, desc, 1d0, c, 1, 1, desc, plan))
    call ok(pmm3d_run(plan))
    call same('planned sum', c, matmul(a, b) + transpose(a))
    call ok(pmm3d_free(plan))
    call ok(pmm3d_context_trim(context))
    call ok(pmm3d_matrix(grid, 'd', n, n, '/', 'F', a, matrices(1)))
    call ok(pmm3d_matrix(grid, 'd', n, n, '/', 'F', b, matrices(2)))
    call ok(pmm3d_matrix(grid, 'd', n, n, '/', 'F', x, matrices(3)))
    call ok(pmm3d_plan_matmul('N', 'N', 1d0, matrices(1), matrices(2), 0d0, matrices(3), plan))
    call ok(pmm3d_run_matmul(plan, 2d0, matrices(2), matrices(1), 0d0, matrices(3)))
    call same('other matrices', x, 2*matmul(b, a), everywhere=.true.)
    call ok(pmm3d_box(grid, '/', n, n, box))
    call ok(pmm3d_from_block_cyclic(context, a, desc, matrices(3)))
    call same('from block-cyclic', x, a, everywhere=.true.)
    if (any(box /= [1, n, 1, n]) .or. request /= 0) wrong = wrong + 1
    print "(i0, ' bytes, wrong: ', i0)", storage_size(n)/8, wrong
    call ok(pmm3d_finalize())
    call MPI_Finalize(ierr)

contains

    function lower(matrix)
        real(d), intent(in) :: matrix(n, n)
        real(d) :: lower(n, n)
        integer :: i, j
        do j = 1, n
            do i = 1, n
                lower(i, j) = merge(matrix(i, j), 0d0, i >= j)
            end do
        end do
    end function

    ! The first rank has the block-cyclic matrices.
    subroutine same(name, found, expected, everywhere)
        character(len=*), intent(in) :: name
        real(d), intent(in) :: found(..), expected(..)
        logical, intent(in), optional :: everywhere
        real(d) :: difference
        difference = 0
        select rank (found)
        rank (1)
            select rank (expected)
            rank (1); difference = maxval(abs(found - expected))
            end select
        rank (2)
            select rank (expected)
            rank (2); difference = maxval(abs(found - expected))
            end select
        end select
        if (rank > 0 .and. .not. present(everywhere)) return
        if (difference > 1d-10) then
            print "(a, ' differs by ', es8.1)", name, difference
            wrong = wrong + 1
        end if
    end subroutine

    subroutine ok(code)
        integer, intent(in) :: code
        integer(c_int) :: error
        if (code == PMM3D_OK) return
        print "(a)", pmm3d_last_error()
        call MPI_Abort(MPI_COMM_WORLD, 1_c_int, error)
    end subroutine
end program
